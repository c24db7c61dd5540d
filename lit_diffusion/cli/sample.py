"""`lit-diffusion sample`: images from a checkpoint, as PNG."""

from argparse import Namespace
from collections.abc import Sequence

from lit_diffusion.cli.options import (
    add_checkpoint,
    add_data,
    add_sampling,
    integers,
    parse_sampling,
)
from lit_diffusion.cli.parser import Parser
from lit_diffusion.signals import print_error, raise_on_signals


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "sample",
        """Write images that a checkpoint generates.

    lit-diffusion sample --checkpoint runs/digits --num 64 --out samples
    lit-diffusion sample --checkpoint runs/digits/checkpoints/best-fid.ckpt --out sevens \\
        --labels 7 --guidance 2
    lit-diffusion sample --checkpoint runs/digits-described --out sevens \\
        --prompt "thick seven leaning right" --prompt "thin seven upright"
    lit-diffusion sample --checkpoint runs/digits --out heun --solver Heun --solver.steps 18
    lit-diffusion sample --checkpoint runs/digits --num 4 --out paths --trajectory
    lit-diffusion sample --checkpoint runs/digits --num 1440 --out compared --compare solvers

Image i has the seed SEED + i and is the same in any batch and on any device. OUT gets 000000.png,
000001.png, ... at their own size, grid.png with the first of them, and samples.json, which says how
they were made. A call that is stopped keeps what it has made; the same command goes on.

--trajectory adds trajectory.png and trajectory.gif: x_t and the x0 guessed from it, step by step,
of the first four. --compare makes the NUM images by each solver at each number of steps, in a
folder each, beside comparison.png, .csv and .json: the first twelve of all, with their FIDs.""",
    )
    add_checkpoint(made, required=True)
    made.add_argument("--num", type=int, default=64, help="number of images (default 64)")
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the images")
    made.add_argument(
        "--trajectory", action="store_true", help="show the way of the first images from noise"
    )
    made.add_argument(
        "--compare",
        metavar="S",
        help="solvers, for all that the process allows, or some of them by name: DDIM,Heun,UniPC",
    )
    made.add_argument(
        "--compare_steps",
        type=integers,
        metavar="5,10,20,50",
        help="numbers of steps of --compare (default 5,10,20,50)",
    )
    made.add_argument(
        "--reference",
        metavar="DATA",
        help="real images for the FIDs of --compare, as of `evaluate`",
    )
    add_data(made)
    add_sampling(made)
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "sample", then options."""
    args = parse_sampling(parser(), argv[1:])
    if args.compare is not None:
        _refuse_beside_compare(args)
    elif args.compare_steps or args.reference or args.data:
        raise ValueError("--compare_steps, --reference and --data need --compare.")
    from lit_diffusion.cli.comparing_solvers import compare_solvers
    from lit_diffusion.cli.sampling import (
        folder_of_images,
        load_generator,
        unfinished,
        write_samples,
    )

    out = folder_of_images(args.out)
    try:
        with raise_on_signals():
            loaded = load_generator(args)
            if args.compare is not None:
                print(compare_solvers(loaded, args, out))
                return
            record = write_samples(loaded, args, args.num, out)
    except KeyboardInterrupt:
        made = unfinished(out).get("num", 0)
        some = "" if args.compare else f" with {made} of {args.num} images in {out}"
        print_error(f"Stopped{some}; the same command goes on.")
        raise
    print(f"{args.num} images in {out}, from {record['weights']} weights of {loaded.path}.")


def _refuse_beside_compare(args: Namespace) -> None:
    names = ("solver", "steps", "trajectory", "init", "strength", "mask")
    given = [f"--{name}" for name in names if str(getattr(args, name)) not in ("None", "False")]
    given += [option for option in args.solver_options if option.startswith("--solver.steps")]
    if given:
        raise ValueError(
            f"--compare goes through solvers and steps, from noise; leave out {', '.join(given)}."
        )
