"""`lit-diffusion train-extractor`: train a network for FID on your own images."""

from collections.abc import Sequence

from lit_diffusion.cli import options
from lit_diffusion.cli.options import Parser, integer


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "train-extractor",
        """Train a small network for FID on the training images of a config. It needs no download.

    lit-diffusion train-extractor --config flowers.yaml --out flowers-cnn.safetensors
    lit-diffusion fit --config flowers.yaml \\
        --trainer.callbacks.FIDEvaluation.extractor=flowers-cnn.safetensors

The network learns to classify the images, or to distinguish them if there are no classes, and to
tell how blurred and noisy they are. FIDs are comparable only if they use the same file, so keep the
file. Options --data.NAME=VALUE work as in fit.""",
    )
    add = parser.add_argument
    text = "YAML with the data; may be repeated, as in fit"
    add("-c", "--config", required=True, action="append", metavar="FILE", help=text)
    add("--out", required=True, metavar="FILE.safetensors", help="file to write")
    add("--steps", type=integer, default=1500, metavar="N", help="training steps (default 1500)")
    text = "images per step (default 128)"
    add("--batch-size", type=integer, default=128, metavar="B", help=text)
    options.add_device(parser)
    options.add_trust(parser, "the config")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "train-extractor", then options."""
    args, others = build_parser().parse_prefixed(argv[1:], "--data.", "--data=")
    options.check_exists("config", *args.config)
    from lit_diffusion.cli.run_data import build_data, read_data_settings
    from lit_diffusion.metrics.extractors import TrainedCNN
    from lit_diffusion.metrics.images import open_split
    from lit_diffusion.metrics.small_classifier import train_extractor
    from lit_diffusion.signals import print_error

    settings, path = read_data_settings(None, args.config)
    data = build_data(settings, args.trust, path, others)
    if data is None:
        raise ValueError(f"{path} must name data with splits, got none; add them under data:.")
    train_extractor(
        open_split(data, "train"),
        args.out,
        getattr(data, "num_classes", None),
        steps=args.steps,
        batch_size=args.batch_size,
        device=options.usable_device(args.device),
        log=print_error,
    )
    protocol = TrainedCNN(args.out)
    distinguishes = protocol.record["told_apart"]
    print_error(f"{args.out} holds {protocol.name}, which distinguishes {distinguishes}.")
