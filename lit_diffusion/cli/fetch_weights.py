"""`lit-diffusion fetch-weights`: download the weights of a feature extractor."""

from collections.abc import Sequence

from lit_diffusion.cli.options import Parser


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "fetch-weights",
        """Download the weights of a feature extractor for FID, and check their SHA-256.

Run it once on a machine with internet access, such as the login node of a cluster. The extractors
digits-cnn and patches-cnn need no download.""",
    )
    text = """feature extractor: inception-v3-compat (default, 96 MB), dinov2-vit-l-14 (1.2 GB) or
        clip-vit-b-32 (350 MB)"""
    parser.add_argument("--extractor", metavar="NAME", default="inception-v3-compat", help=text)
    text = "file or folder to write (default: the cache that FID reads)"
    parser.add_argument("--to", metavar="PATH", help=text)
    text = "URL of a mirror (default: the URL of the publisher)"
    parser.add_argument("--url", metavar="URL", help=text)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "fetch-weights", then options."""
    args = build_parser().parse_args(argv[1:])
    from lit_diffusion.metrics.weight_files import fetch_weights

    path = fetch_weights(args.to, args.url, args.extractor)
    print(f"The weights of {args.extractor} are in {path}.")
