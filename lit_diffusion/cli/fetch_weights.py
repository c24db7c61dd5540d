"""`lit-diffusion fetch-weights`: download the Inception weights that FID needs."""

from collections.abc import Sequence

from lit_diffusion.cli.options import Parser


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "fetch-weights",
        """Download the Inception weights of torch-fidelity (96 MB), and check their SHA-256.

Run it once on a machine with internet access, such as the login node of a cluster. The extractors
digits-cnn and patches-cnn need no download.""",
    )
    text = "file or folder to write (default: the cache that FID reads)"
    parser.add_argument("--to", metavar="PATH", help=text)
    parser.add_argument(
        "--url", metavar="URL", help="URL of a mirror (default: torch-fidelity's URL)"
    )
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "fetch-weights", then options."""
    args = build_parser().parse_args(argv[1:])
    from lit_diffusion.metrics.extractors import fetch_weights

    path = fetch_weights(args.to, **({"url": args.url} if args.url else {}))
    print(f"The Inception weights are in {path}.")
