"""`lit-diffusion fetch-weights`: the network that FID needs, for a machine without internet."""

from collections.abc import Sequence

from lit_diffusion.cli.options import Parser


def build_parser() -> Parser:
    """Options of the command."""
    parser = Parser(
        "fetch-weights",
        """Download torch-fidelity's Inception weights (96 MB) and check their SHA-256.

Run it once where there is internet access, such as on the login node of a cluster. The protocols
digits-cnn and patches-cnn need no download.""",
    )
    text = "file or folder (default: the cache where FID looks)"
    parser.add_argument("--to", metavar="PATH", help=text)
    parser.add_argument("--url", help="URL of a mirror (default: torch-fidelity's)")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "fetch-weights", then options."""
    args = build_parser().parse_args(argv[1:])
    from lit_diffusion.metrics.extractors import fetch_weights

    path = fetch_weights(args.to, **({"url": args.url} if args.url else {}))
    print(f"Inception weights are at {path}.")
