"""`lit-diffusion sample`: images from a checkpoint, as PNG."""

from collections.abc import Sequence

from lit_diffusion.commands.options import add_checkpoint, add_sampling, parse_sampling
from lit_diffusion.settings.parser import Parser
from lit_diffusion.system.signals import print_error, stoppable


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

Image i has the seed SEED + i and is the same in any batch and on any device. OUT gets 000000.png,
000001.png, ... at their own size, grid.png with the first of them, and samples.json, which says how
they were made. A call that is stopped keeps what it has made; the same command goes on.""",
    )
    add_checkpoint(made, required=True)
    made.add_argument("--num", type=int, default=64, help="number of images (default 64)")
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the images")
    add_sampling(made)
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "sample", then options."""
    args = parse_sampling(parser(), argv[1:])
    from lit_diffusion.runs.sampling import (
        folder_of_images,
        load_generator,
        unfinished,
        write_samples,
    )

    out = folder_of_images(args.out)
    try:
        with stoppable():
            loaded = load_generator(args)
            record = write_samples(loaded, args, args.num, out)
    except KeyboardInterrupt:
        made = unfinished(out).get("num", 0)
        print_error(f"Stopped with {made} of {args.num} images in {out}; the same command goes on.")
        raise
    print(f"{args.num} images in {out}, from {record['weights']} weights of {loaded.path}.")
