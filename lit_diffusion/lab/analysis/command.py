"""`lit-diffusion analyze consistency | interpolate | landscape | hessian`."""

from collections.abc import Sequence

from lit_diffusion.cli.options import Parser, add_data, add_trust, numbers
from lit_diffusion.signals import raise_on_signals


def parser() -> Parser:
    """What `lit-diffusion analyze --help` says."""
    return Parser(
        "analyze",
        """Look at checkpoints: of diffusion models, of GANs, of any LightningModule with `generate`
or `per_sample_loss`.

    lit-diffusion analyze consistency runs/a runs/b runs/c --out consistency
    lit-diffusion analyze interpolate runs/a runs/b --align --out line
    lit-diffusion analyze landscape runs/a --out surface
    lit-diffusion analyze landscape runs/a --path runs/a/checkpoints/step-*.ckpt --out way
    lit-diffusion analyze hessian runs/a --levels 0.1,0.5,0.9 --out spectrum

Each writes arrays (.npz), numbers (.json) and a picture to OUT, and says before it starts what it
will cost. A call that is stopped keeps what it has; the same command goes on. Processes that
torchrun or srun starts share the work.""",
    )


def _parser(name: str, description: str) -> Parser:
    made = Parser(f"analyze {name}", description)
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the results")
    made.add_argument("--weights", default="ema", help="ema (default), ema_<decay> or raw")
    made.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add_data(made)
    add_trust(made, "the checkpoints and configs")
    return made


def _with_losses(name: str, description: str, weights: str = "raw") -> Parser:
    made = _parser(name, description)
    made.set_defaults(weights=weights)
    made.add_argument(
        "--images", type=int, default=256, metavar="N", help="training images (default 256)"
    )
    made.add_argument(
        "--levels",
        type=numbers,
        default=[0.1, 0.5, 0.9],
        metavar="U,U",
        help="noise levels in [0, 1], of which 1 is the noisiest (default 0.1,0.5,0.9)",
    )
    return made


def consistency_parser() -> Parser:
    """Options of `analyze consistency`."""
    made = _parser(
        "consistency",
        """Whether models make the same images of the same seeds: PSNR, beside that of other seeds,
and of the training images nearest to the samples.""",
    )
    made.add_argument("checkpoints", nargs="+", metavar="C", help="two or more")
    made.add_argument("--num", type=int, default=32, help="seeds (default 32)")
    made.add_argument("--seed", type=int, default=0, help="the first (default 0)")
    made.add_argument("--extractor", help="of features (default: that of the first run)")
    made.add_argument("--batch-size", type=int, default=64, metavar="B", help="default 64")
    return made


def interpolate_parser() -> Parser:
    """Options of `analyze interpolate`."""
    made = _with_losses("interpolate", "Losses on the line between two checkpoints.")
    made.add_argument("first", metavar="A", help="checkpoint at alpha = 1")
    made.add_argument("second", metavar="B", help="checkpoint at alpha = 0")
    made.add_argument("--points", type=int, default=51, help="on the line (default 51)")
    made.add_argument(
        "--align", action="store_true", help="once more with B's hidden features in A's order"
    )
    return made


def landscape_parser() -> Parser:
    """Options of `analyze landscape`."""
    made = _with_losses(
        "landscape",
        """Losses on a plane through a checkpoint: along two random directions, normalised filter by
filter, the same for all checkpoints of one --seed; or through the way that a run took.""",
    )
    made.add_argument("checkpoint", metavar="C", help="at the center")
    made.add_argument("--points", type=int, default=21, help="along each side (default 21)")
    made.add_argument(
        "--span",
        type=float,
        default=1.0,
        help="how far, in lengths of filters; not with --path (default 1)",
    )
    made.add_argument("--seed", type=int, default=0, help="of the directions (default 0)")
    made.add_argument("--path", nargs="+", metavar="C", help="checkpoints of the run, in order")
    return made


def hessian_parser() -> Parser:
    """Options of `analyze hessian`."""
    made = _with_losses(
        "hessian",
        """Eigenvalues of the Hessian of each loss, by stochastic Lanczos quadrature.""",
    )
    made.add_argument("checkpoint", metavar="C", help="whose weights are in place")
    made.add_argument("--steps", type=int, default=80, help="of Lanczos (default 80)")
    made.add_argument("--vectors", type=int, default=4, help="random starts (default 4)")
    made.add_argument(
        "--kinks", action="store_true", help="go on where gradients jump, as with ReLU"
    )
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "analyze", what to do, then options.

    Raises:
        ValueError: for what cannot be done.
    """
    parsers = {
        "consistency": consistency_parser,
        "interpolate": interpolate_parser,
        "landscape": landscape_parser,
        "hessian": hessian_parser,
    }
    name = argv[1] if len(argv) > 1 else ""
    if name not in parsers:
        parser().parse_args([arg for arg in argv[1:] if arg in ("-h", "--help")])
        raise ValueError(f"say {', '.join(parsers)} first, got {' '.join(argv[1:]) or 'nothing'}.")
    args = parsers[name]().parse_args(argv[2:])
    from lit_diffusion.lab.analysis import analyzing

    kinds = {
        "consistency": analyzing.compare_images,
        "interpolate": analyzing.interpolate_weights,
        "landscape": analyzing.survey,
        "hessian": analyzing.spectra,
    }
    with raise_on_signals():
        print(kinds[name](args))
