"""`lit-diffusion convert export | import`: weights for other programs, and from them."""

from collections.abc import Sequence
from typing import Any

import yaml

from lit_diffusion.cli.options import add_checkpoint
from lit_diffusion.cli.parser import Parser

KINDS = ("improved-diffusion", "guided-diffusion", "uvit", "dit", "diffusers-unet")


def parser() -> Parser:
    """What `lit-diffusion convert --help` says."""
    return Parser(
        "convert",
        """Take weights to other programs, or bring published ones in.

    lit-diffusion convert export --checkpoint runs/digits --out exported
    lit-diffusion convert export --checkpoint runs/digits --out exported --format diffusers
    lit-diffusion convert import DiT-XL-2-256x256.pt --kind dit --out dit --network.num_heads=16
    lit-diffusion fit --config FILE --init_weights dit

`lit-diffusion convert export --help` and `convert import --help` say which options they have.""",
    )


def export_parser() -> Parser:
    """Options of `convert export`."""
    made = Parser(
        "convert export",
        """Write the network of a checkpoint for other programs.

    safetensors  network.safetensors, and network.json that says how the network is built;
                 lit_diffusion.interchange.load_network(DIR) reads them with torch alone
    diffusers    a folder for DDPMPipeline.from_pretrained (UNet) or DiTPipeline (DiT); what
                 cannot be said in diffusers' words is refused""",
    )
    add_checkpoint(made, required=True)
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the files")
    forms = ("safetensors", "diffusers")
    made.add_argument("--format", default="safetensors", choices=forms, help="default safetensors")
    made.add_argument("--vae", metavar="DIR", help="AutoencoderKL to put beside a DiT of latents")
    return made


def import_parser() -> Parser:
    """Options of `convert import`."""
    made = Parser(
        "convert import",
        """Read published weights, and write them as `convert export` does.

Shapes tell most of how a network is built. What they cannot tell is asked for, to be given as
--network.NAME=VALUE: num_heads or head_channels, split_heads_first, null_class, ...
No code in a file is run.""",
    )
    made.add_argument("file", metavar="FILE", help="as published; of diffusers the folder")
    made.add_argument("--kind", required=True, choices=KINDS, help="which program wrote it")
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the files")
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "convert", "export" or "import", then options.

    Raises:
        ValueError: for what cannot be converted.
    """
    run_it = {"export": _export, "import": _import}.get(argv[1] if len(argv) > 1 else "")
    if run_it is None:
        parser().parse_args([arg for arg in argv[1:] if arg in ("-h", "--help")])
        raise ValueError(f"say export or import first, got {' '.join(argv[1:]) or 'nothing'}.")
    run_it(argv[2:])


def _export(options: Sequence[str]) -> None:
    args = export_parser().parse_args(options)
    from lit_diffusion.cli.exporting import export

    loaded, said = export(
        args.checkpoint, args.out, args.weights, args.format, args.vae, args.trust
    )
    print("\n".join([f"{loaded.weights} weights of {loaded.path} are in {args.out}.", *said]))


def _import(options: Sequence[str]) -> None:
    made = import_parser()
    args, others = made.parse_known_args(options)
    arguments: dict[str, Any] = {}
    for other in others:
        name, equals, value = other.removeprefix("--network.").partition("=")
        if not (equals and other.startswith("--network.")):
            made.error(f"unrecognized arguments: {other}")
        try:
            arguments[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{other} must be --network.NAME=VALUE in YAML; quote it.") from None
    from lit_diffusion.interchange.published import convert

    spec = convert(args.file, args.kind, args.out, arguments)
    said = ", ".join(f"{name}={value}" for name, value in spec["init_args"].items())
    print(f"{spec['class_path'].rpartition('.')[2]}({said}) is in {args.out}.")
