"""`lit-diffusion convert export | import`: weights to and from other programs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.cli.options import Parser, add_checkpoint, check_exists

DESCRIPTION = """Export weights to other programs, or import published weights.

    lit-diffusion convert export --checkpoint runs/digits --out exported
    lit-diffusion convert export --checkpoint runs/digits --out exported --format diffusers
    lit-diffusion convert import DiT-XL-2-256x256.pt --kind dit --out dit --network.num_heads=16
    lit-diffusion fit --config FILE --config dit/model.yaml --init_weights dit

`lit-diffusion convert export --help` and `convert import --help` list the options."""

KINDS = ("improved-diffusion", "guided-diffusion", "uvit", "dit", "diffusers-unet")


def build_parser(name: str = "") -> Parser:
    """Options of `convert export` or `convert import`, or the help of `convert` itself."""
    builders = {"export": _export_parser, "import": _import_parser}
    return builders[name]() if name in builders else Parser("convert", DESCRIPTION)


def _export_parser() -> Parser:
    parser = Parser(
        "convert export",
        """Write the network of a checkpoint for other programs.

    safetensors  network.safetensors, and network.json, which says how to build the network;
                 lit_diffusion.interchange.load_network(DIR) reads both with torch alone
    diffusers    a folder for DDPMPipeline.from_pretrained (UNet) or DiTPipeline (DiT); a
                 model that diffusers cannot express is refused. If diffusers is installed,
                 images from two seeds show whether the pipeline reproduces the run""",
    )
    add_checkpoint(parser, required=True)
    add, forms = parser.add_argument, ("safetensors", "diffusers")
    add("--out", required=True, metavar="DIR", help="folder for the files")
    text = "safetensors (default) or diffusers"
    add("--format", default=forms[0], choices=forms, metavar="F", help=text)
    text = "diffusers: AutoencoderKL to include with a DiT that was trained on latents"
    add("--vae", metavar="DIR", help=text)
    text = "diffusers: do not compare images of the pipeline with those of the run"
    add("--no_comparison", action="store_true", help=text)
    return parser


def _import_parser() -> Parser:
    parser = Parser(
        "convert import",
        """Read published weights, and write them in the format of `convert export`.

    lit-diffusion convert import DiT-XL-2-256x256.pt --kind dit --out dit --network.num_heads=16

Most arguments of the network follow from the shapes of its weights. An error names the others. Set
them by --network.NAME=VALUE: num_heads, head_channels, split_heads_first, null_class, ... No code
in the file is executed.""",
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="published file; for diffusers-unet, the folder")
    text = f"program that wrote the file: {', '.join(KINDS)}"
    add("--kind", required=True, choices=KINDS, metavar="KIND", help=text)
    add("--out", required=True, metavar="DIR", help="folder for the files")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "convert", "export" or "import", then options.

    Raises:
        ValueError: if the file or checkpoint cannot be converted.
    """
    match argv[1:2]:
        case ["export"]:
            args = build_parser("export").parse_args(argv[2:])
            check_exists("run folder or checkpoint", args.checkpoint)
            options = args.weights, args.format, args.vae, args.trust
            export(args.checkpoint, args.out, *options, compare=not args.no_comparison)
        case ["import"]:
            _import(argv[2:])
        case _:
            build_parser().parse_args([arg for arg in argv[1:] if arg in ("-h", "--help")])
            got = " ".join(argv[1:]) or "nothing"
            raise ValueError(f"the word after convert must be export or import, got {got}.")


def export(
    checkpoint: str | Path,
    folder: str | Path,
    weights: str = "ema",
    form: str = "safetensors",
    vae: str | None = None,
    trust: Iterable[str] = (),
    compare: bool = True,
) -> None:
    """Write the network of a checkpoint (a file or run folder), and print what to know of it.

    The form is "safetensors" (`interchange.exported`) or "diffusers" (`diffusers_folder`). For a
    latent DiT in the diffusers form, `vae` is the folder of its AutoencoderKL. `compare` generates
    images of two seeds by the diffusers pipeline and by the run, when the files are complete.

    Raises:
        ValueError: if the checkpoint does not describe its network, or diffusers does not support
            the model.
    """
    from torch import nn

    from lit_diffusion.checkpoints.loading import load_module, model_spec
    from lit_diffusion.interchange.diffusers_folder import compare_with_pipeline, write_diffusers
    from lit_diffusion.interchange.exported import write_network

    if vae is not None and form != "diffusers":
        raise ValueError(f"--vae {vae} belongs to --format diffusers; leave it out.")
    loaded = load_module(checkpoint, weights, trust=trust)
    arguments = (model_spec(loaded.checkpoint) or {"init_args": {}})["init_args"]
    network = getattr(loaded.module, "network", None)
    if not isinstance(network, nn.Module) or not isinstance(arguments.get("network"), dict):
        raise ValueError(
            f"{loaded.path} does not say of which class and arguments its network is; export a run "
            "of a config whose model has a network."
        )
    names = ("process", "parameterization", "image_shape", "num_classes")
    record = {name: arguments[name] for name in names if name in arguments}
    record |= {"network": arguments["network"], "step": loaded.step, "weights": loaded.weights}
    state = dict(network.state_dict())
    remarks = []
    if form == "diffusers":
        remarks = write_diffusers(folder, loaded.module, record, state, vae)
    else:
        write_network(folder, state, record)
    lines = [f"{loaded.weights} weights of {loaded.path} are in {folder}.", *remarks]
    print("\n".join(lines), flush=True)
    if form == "diffusers" and compare:
        print(compare_with_pipeline(folder, loaded.module))


def _import(options: Sequence[str]) -> None:
    """Run `convert import`."""
    parser = build_parser("import")
    args, others = parser.parse_prefixed(options, "--network.")
    arguments: dict[str, Any] = {}
    for other in others:
        name, equals, value = other.removeprefix("--network.").partition("=")
        if not (equals and other.startswith("--network.")):
            parser.error(f"unrecognized arguments: {other}")
        try:
            arguments[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):  # also an integer of thousands of digits
            raise ValueError(f"{other} must be --network.NAME=VALUE in YAML; quote it.") from None
    check_exists("file", args.file)
    from lit_diffusion.files import atomic_write_text
    from lit_diffusion.interchange.published import convert, model_config

    spec = convert(args.file, args.kind, args.out, arguments)
    class_name = spec["class_path"].rpartition(".")[2]
    built_with = ", ".join(f"{name}={value}" for name, value in spec["init_args"].items())
    print(f"{class_name}({built_with}) is in {args.out}.")
    model = yaml.safe_dump({"model": model_config(spec)}, sort_keys=False)
    options = f"--config {args.out}/model.yaml --init_weights {args.out}"
    fit = f"lit-diffusion fit --config CONFIG {options}"
    atomic_write_text(Path(args.out) / "model.yaml", f"# {fit}\n{model}")
    print(f"To train it on, over a config of process, loss and data: {fit}")
