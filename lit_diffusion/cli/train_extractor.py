"""`lit-diffusion train-extractor`: a network for FID on images of one's own, without a download."""

import sys
from collections.abc import Sequence

from lit_diffusion.cli.options import add_trust
from lit_diffusion.cli.parser import Parser


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "train-extractor",
        """Train a small network on the training images of a config, for FID without a download.

    lit-diffusion train-extractor --config flowers.yaml --out flowers-cnn.safetensors
    lit-diffusion fit --config flowers.yaml \\
        --trainer.callbacks.FIDEvaluation.extractor=flowers-cnn.safetensors

It learns the classes, or without classes to tell the images apart, and how blurred and noisy they
are. An FID by it compares with others by the same file only: keep the file. Options --data... are
those of fit.""",
    )
    made.add_argument("--config", required=True, metavar="FILE", help="YAML with the data")
    made.add_argument("--out", required=True, metavar="FILE.safetensors", help="file to write")
    made.add_argument("--steps", type=int, default=1500, help="of training (default 1500)")
    made.add_argument(
        "--batch-size", type=int, default=128, metavar="B", help="images a step (default 128)"
    )
    made.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add_trust(made, "the config")
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "train-extractor", then options."""
    args, others = parser().parse_known_args(argv[1:])
    if others and not others[0].startswith("--data."):
        parser().error(f"unrecognized arguments: {' '.join(others)}")
    from lit_diffusion.cli.evaluating import data_of
    from lit_diffusion.cli.sampling import usable_device
    from lit_diffusion.config.yaml_file import read_yaml
    from lit_diffusion.metrics.extractor_training import train_extractor
    from lit_diffusion.metrics.extractors import TrainedCNN
    from lit_diffusion.metrics.reference import images_of_split
    from lit_diffusion.signals import print_error

    config = read_yaml(args.config)
    spec = config.get("data") if isinstance(config, dict) else None
    data = data_of(spec, args.trust, args.config, others)
    if data is None:
        raise ValueError(f"{args.config} names no data with splits under data:, to train on.")
    train_extractor(
        images_of_split(data, "train"),
        args.out,
        getattr(data, "num_classes", None),
        steps=args.steps,
        batch_size=args.batch_size,
        device=usable_device(args.device),
        say=print_error,
    )
    protocol = TrainedCNN(args.out)
    told = protocol.record["told_apart"]
    print(f"{args.out} holds {protocol.name}, which tells {told} apart.", file=sys.stderr)
