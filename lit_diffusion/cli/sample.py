"""`lit-diffusion sample`: generate PNG images from a checkpoint."""

from collections.abc import Sequence

from lit_diffusion.cli import options
from lit_diffusion.cli.options import Parser, integer, integers
from lit_diffusion.signals import print_error, raise_on_signals


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "sample",
        """Generate images from a checkpoint.

    lit-diffusion sample --checkpoint runs/digits --num 64 --out samples
    lit-diffusion sample --checkpoint runs/digits/checkpoints/best-fid.ckpt --out sevens \\
        --labels 7 --guidance 2
    lit-diffusion sample --checkpoint runs/digits-described --out sevens \\
        --prompt "thick seven leaning right" --prompt "thin seven upright"
    lit-diffusion sample --checkpoint runs/digits --out heun --solver Heun --solver.steps 18
    lit-diffusion sample --checkpoint runs/digits --num 4 --out paths --trajectory
    lit-diffusion sample --checkpoint runs/digits --num 1440 --out compared --compare solvers

Image i has the seed SEED + i. Up to rounding, the image does not depend on batch size and device.
The folder gets 000000.png, 000001.png, ..., grid.png with the first images, and samples.json, which
records how they were generated. If the command is stopped, repeat it to generate the rest.

--trajectory adds trajectory.png and trajectory.gif with x_t and the predicted x0 of the first four
images at each step. --compare generates the images with each solver and number of steps, each in a
folder of its own. It writes the first twelve images to comparison.png, and the FIDs to
comparison.csv and comparison.json.""",
    )
    options.add_checkpoint(parser, required=True)
    add = parser.add_argument
    add("--num", type=integer, default=64, metavar="N", help="number of images (default 64)")
    add("--out", required=True, metavar="DIR", help="folder for the images")
    text = "draw the first four images at every solver step"
    add("--trajectory", action="store_true", help=text)
    text = "solvers to compare: DDIM,Heun,UniPC; or solvers: all that the process supports"
    add("--compare", metavar="S", help=text)
    text = "numbers of solver steps for --compare (default 5,10,20,50)"
    parser.add_rare("--compare_steps", type=integers, metavar="N,N", help=text)
    text = """real images for the FIDs of --compare: train, val (default) or test split of the data
        of the run, a folder, or an .npz"""
    parser.add_rare("--reference", metavar="R", help=text)
    options.add_data(parser)
    options.add_sampling(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "sample", then options."""
    args = options.parse_sampling(build_parser(), argv[1:])
    sampling = options.sampling_options(args)
    if args.compare is None:
        if args.compare_steps or args.reference or args.data:
            raise ValueError("--compare_steps, --reference and --data need --compare; add it.")
    else:
        names = ("solver", "steps", "init", "mask")
        excluded = [f"--{name}" for name in names if getattr(sampling, name) is not None]
        excluded += ["--trajectory"] * args.trajectory
        excluded += [o for o in sampling.solver_options if o.startswith("--solver.steps")]
        if excluded:
            raise ValueError(
                "--compare sets solvers and numbers of steps, and starts from noise; leave out "
                f"{', '.join(excluded)}."
            )
    options.check_checkpoints(args.checkpoint)
    options.check_exists("image or folder", args.init, args.mask)
    options.check_exists("config", *(args.data or ()))
    with options.import_heavy():
        from lit_diffusion.cli.generator import load_generator
        from lit_diffusion.cli.sampling import image_folder, unfinished_record, write_samples

    folder = image_folder(args.out)
    try:
        with raise_on_signals():
            if args.compare is not None:
                from lit_diffusion.cli.solver_comparison import ComparisonOptions, compare_solvers

                comparison = ComparisonOptions(
                    args.compare, args.compare_steps, args.num, args.reference, args.data
                )
                print(compare_solvers(sampling, comparison, folder))
                return
            record = write_samples(load_generator(sampling), args.num, folder, args.trajectory)
    except KeyboardInterrupt:
        last_file = "grid.png" if args.compare is None else "comparison.png"
        if (folder / last_file).exists():
            print_error(f"Stopped, but everything is in {folder}.")
            raise
        num = unfinished_record(folder).get("num", 0)
        progress = "" if args.compare else f" with {num} of {args.num} images in {folder}"
        print_error(f"Stopped{progress}. Repeat the command to continue.")
        raise
    source = f"{record['weights']} weights of {record['checkpoint']}"
    if (solver := record["sampling"].get("solver")) is not None:
        source += f", by {solver}"
    print(f"{args.num} images in {folder}, from {source}.")
