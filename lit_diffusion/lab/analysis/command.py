"""Parse options of `lit-diffusion analyze consistency | interpolate | landscape | hessian`."""

from argparse import Namespace
from collections.abc import Callable, Sequence

from lit_diffusion.cli.options import (
    Parser,
    add_data,
    add_device,
    add_trust,
    check_checkpoints,
    check_exists,
    integer,
    number,
    numbers,
    require_lab,
)
from lit_diffusion.signals import raise_on_signals

HELP = """Analyze checkpoints of diffusion models, of GANs, or of any LightningModule with
`generate` or `per_sample_loss`.

    lit-diffusion analyze consistency runs/a runs/b runs/c --out consistency
    lit-diffusion analyze interpolate runs/a runs/b --align --out line
    lit-diffusion analyze landscape runs/a --out surface
    lit-diffusion analyze landscape runs/a --path runs/a/checkpoints/epoch=*.ckpt --out way
    lit-diffusion analyze hessian runs/a --levels 0.1,0.5,0.9 --out spectrum

Each analysis writes arrays (.npz), numbers (.json) and a figure (.png) to OUT. Before it starts, it
prints how long it is expected to take. To continue a stopped analysis, run the same command again.
Processes of torchrun or srun share the work."""


DESCRIPTIONS = {
    "consistency": """Measure by PSNR how similar the images are that models generate from the same
seeds. For comparison, also measure the PSNR between images of different seeds, and between images
and their nearest training images.""",
    "interpolate": "Compute losses on the line between two checkpoints.",
    "landscape": """Compute losses on a plane through a checkpoint. Two random directions span the
plane. They depend on --seed and are normalized filter by filter. With --path, it is instead the
plane that is closest to the checkpoints of a run.""",
    "hessian": """Estimate the eigenvalues of the Hessian of each loss, by stochastic Lanczos
quadrature.""",
}


def run(argv: Sequence[str]) -> None:
    """Run the command. `argv` is "analyze", the name of the analysis, and options.

    Raises:
        ValueError: for invalid options, checkpoints or data.
    """
    name = argv[1] if len(argv) > 1 else ""
    if name not in DESCRIPTIONS:
        Parser("analyze", HELP).parse_args([arg for arg in argv[1:] if arg in ("-h", "--help")])
        listed = ", ".join(DESCRIPTIONS)
        raise ValueError(f"pass one of {listed} first, got {' '.join(argv[1:]) or 'nothing'}.")
    options = build_parser(name).parse_args(argv[2:])
    values = vars(options)
    paths = [values.get(key) for key in ("checkpoint", "first", "second")]
    check_checkpoints(*paths, *values.get("checkpoints", ()), *(values.get("path") or ()))
    check_exists("config", *(options.data or ()))
    require_lab()
    from lit_diffusion.lab.analysis import common, consistency, hessian, interpolation, landscape

    analyses: dict[str, Callable[[Namespace], str]] = {
        "consistency": consistency.compare_images,
        "interpolate": interpolation.interpolate_weights,
        "landscape": landscape.plot_landscape,
        "hessian": hessian.compute_spectra,
    }
    with raise_on_signals():
        try:
            print(analyses[name](options))
        except common.UnfinishedAnalysis as notice:
            print(notice)


def build_parser(name: str) -> Parser:
    """Build the parser of one analysis."""
    parser = Parser(f"analyze {name}", DESCRIPTIONS[name])
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for the results")
    weights = "ema" if name == "consistency" else "raw"
    add("--weights", default=weights, help=f"ema, ema_<decay> or raw (default {weights})")
    add_device(parser)
    add_data(parser)
    add_trust(parser, "the checkpoints and configs")
    if name == "consistency":
        add("checkpoints", nargs="+", metavar="C", help="two or more checkpoints")
        add("--num", type=integer, default=32, help="number of seeds (default 32)")
        add("--seed", type=integer, default=0, help="first seed (default 0)")
        add("--extractor", help="feature extractor (default: the first run's)")
        add("--batch-size", type=integer, default=64, metavar="B", help="default 64")
        return parser
    add("--images", type=integer, default=256, help="number of training images (default 256)")
    text = "noise levels in [0, 1], where 1 is the noisiest (default 0.1,0.5,0.9)"
    add("--levels", type=numbers, default=[0.1, 0.5, 0.9], help=text)
    if name == "interpolate":
        add("first", metavar="A", help="checkpoint at alpha = 1")
        add("second", metavar="B", help="checkpoint at alpha = 0")
        add("--points", type=integer, default=51, help="points on the line (default 51)")
        add("--align", action="store_true", help="also permute B's hidden features to match A")
    elif name == "landscape":
        add("checkpoint", metavar="C", help="checkpoint at the center")
        add("--points", type=integer, default=21, help="points along each side (default 21)")
        text = "half of a side, in norms of the filters; without effect with --path (default 1)"
        add("--span", type=number, default=1.0, help=text)
        add("--seed", type=integer, default=0, help="seed of the directions (default 0)")
        text = "checkpoints of the run of C, in order; they define the plane and are drawn in it"
        add("--path", nargs="+", metavar="C", help=text)
    else:
        add("checkpoint", metavar="C", help="checkpoint to analyze")
        add("--steps", type=integer, default=80, help="steps of Lanczos (default 80)")
        add("--vectors", type=integer, default=4, help="number of random starts (default 4)")
        add("--kinks", action="store_true", help="continue if gradients jump, as with ReLU")
    return parser
