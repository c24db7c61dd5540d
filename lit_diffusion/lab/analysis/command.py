"""`lit-diffusion analyze consistency | interpolate | landscape | hessian`: the options of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_diffusion.cli.options import (
    Parser,
    add_data,
    add_device,
    add_trust,
    numbers,
    require_lab,
)
from lit_diffusion.signals import raise_on_signals

HELP = """Analyze checkpoints: of diffusion models, of GANs, of any LightningModule with `generate`
or `per_sample_loss`.

    lit-diffusion analyze consistency runs/a runs/b runs/c --out consistency
    lit-diffusion analyze interpolate runs/a runs/b --align --out line
    lit-diffusion analyze landscape runs/a --out surface
    lit-diffusion analyze landscape runs/a --path runs/a/checkpoints/step-*.ckpt --out way
    lit-diffusion analyze hessian runs/a --levels 0.1,0.5,0.9 --out spectrum

Each writes arrays (.npz), numbers (.json) and a picture to OUT, and prints its cost before it
starts. A call that is stopped keeps what it has; the same command goes on. Processes that
torchrun or srun starts share the work."""


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of all analyses, named as on the command line."""

    out: str
    weights: str
    device: str | None
    data: str | None
    trust: Sequence[str]


@dataclass(frozen=True)
class ConsistencyOptions(AnalysisOptions):
    """Options of `analyze consistency`."""

    checkpoints: Sequence[str]
    num: int
    seed: int
    extractor: str | None
    batch_size: int


@dataclass(frozen=True)
class LossOptions(AnalysisOptions):
    """Options of all analyses of losses."""

    images: int
    levels: Sequence[float]


@dataclass(frozen=True)
class InterpolationOptions(LossOptions):
    """Options of `analyze interpolate`."""

    first: str
    second: str
    points: int
    align: bool


@dataclass(frozen=True)
class LandscapeOptions(LossOptions):
    """Options of `analyze landscape`."""

    checkpoint: str
    points: int
    span: float
    seed: int
    path: Sequence[str] | None


@dataclass(frozen=True)
class HessianOptions(LossOptions):
    """Options of `analyze hessian`."""

    checkpoint: str
    steps: int
    vectors: int
    kinks: bool


def run(argv: Sequence[str]) -> None:
    """Run the command: "analyze", the name of the analysis, then options.

    Raises:
        ValueError: for what cannot be done.
    """
    parsers = {
        "consistency": _consistency_parser,
        "interpolate": _interpolation_parser,
        "landscape": _landscape_parser,
        "hessian": _hessian_parser,
    }
    name = argv[1] if len(argv) > 1 else ""
    if name not in parsers:
        Parser("analyze", HELP).parse_args([arg for arg in argv[1:] if arg in ("-h", "--help")])
        raise ValueError(f"say {', '.join(parsers)} first, got {' '.join(argv[1:]) or 'nothing'}.")
    options = vars(parsers[name]().parse_args(argv[2:]))
    require_lab()
    from lit_diffusion.lab.analysis import consistency, hessian, interpolation, landscape

    with raise_on_signals():
        if name == "consistency":
            print(consistency.compare_images(ConsistencyOptions(**options)))
        elif name == "interpolate":
            print(interpolation.interpolate_weights(InterpolationOptions(**options)))
        elif name == "landscape":
            print(landscape.plot_landscape(LandscapeOptions(**options)))
        else:
            print(hessian.compute_spectra(HessianOptions(**options)))


def _parser(name: str, description: str, weights: str = "ema") -> Parser:
    parser = Parser(f"analyze {name}", description)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results")
    which = f"ema, ema_<decay> or raw (default {weights})"
    parser.add_argument("--weights", default=weights, help=which)
    add_device(parser)
    add_data(parser)
    add_trust(parser, "the checkpoints and configs")
    return parser


def _loss_parser(name: str, description: str) -> Parser:
    parser = _parser(name, description, weights="raw")
    parser.add_argument("--images", type=int, default=256, help="training images (default 256)")
    which = "noise levels in [0, 1], of which 1 is the noisiest (default 0.1,0.5,0.9)"
    parser.add_argument("--levels", type=numbers, default=[0.1, 0.5, 0.9], help=which)
    return parser


def _consistency_parser() -> Parser:
    parser = _parser(
        "consistency",
        """Whether models make the same images of the same seeds: PSNR, beside that of other seeds,
and of the training images nearest to the samples.""",
    )
    parser.add_argument("checkpoints", nargs="+", metavar="C", help="two or more")
    parser.add_argument("--num", type=int, default=32, help="number of seeds (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--extractor", help="of features (default: that of the first run)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="B", help="default 64")
    return parser


def _interpolation_parser() -> Parser:
    parser = _loss_parser("interpolate", "Losses on the line between two checkpoints.")
    parser.add_argument("first", metavar="A", help="checkpoint at alpha = 1")
    parser.add_argument("second", metavar="B", help="checkpoint at alpha = 0")
    parser.add_argument("--points", type=int, default=51, help="on the line (default 51)")
    also = "once more with B's hidden features in A's order"
    parser.add_argument("--align", action="store_true", help=also)
    return parser


def _landscape_parser() -> Parser:
    parser = _loss_parser(
        "landscape",
        """Losses on a plane through a checkpoint: along two random directions, normalized filter by
filter, the same for all checkpoints of one --seed; or through the way that a run took.""",
    )
    parser.add_argument("checkpoint", metavar="C", help="at the center")
    parser.add_argument("--points", type=int, default=21, help="along each side (default 21)")
    reach = "how far, in lengths of filters; not with --path (default 1)"
    parser.add_argument("--span", type=float, default=1.0, help=reach)
    parser.add_argument("--seed", type=int, default=0, help="of the directions (default 0)")
    parser.add_argument("--path", nargs="+", metavar="C", help="checkpoints of the run, in order")
    return parser


def _hessian_parser() -> Parser:
    description = "Eigenvalues of the Hessian of each loss, by stochastic Lanczos quadrature."
    parser = _loss_parser("hessian", description)
    parser.add_argument("checkpoint", metavar="C", help="whose weights are analyzed")
    parser.add_argument("--steps", type=int, default=80, help="of Lanczos (default 80)")
    parser.add_argument("--vectors", type=int, default=4, help="random starts (default 4)")
    jumps = "go on if gradients jump, as with ReLU"
    parser.add_argument("--kinks", action="store_true", help=jumps)
    return parser
