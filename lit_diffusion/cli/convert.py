"""`lit-diffusion convert export | import`: weights to and from other programs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from lit_diffusion.cli.options import Parser, add_checkpoint, check_checkpoints, check_exists

DESCRIPTION = """Export weights to other programs, or import published weights.

    lit-diffusion convert export --checkpoint runs/digits --out exported
    lit-diffusion convert export --checkpoint runs/digits --out exported --format diffusers
    lit-diffusion convert import DiT-XL-2-256x256.pt --kind dit --out dit --network.num_heads=16
    lit-diffusion fit --config FILE --config dit/model.yaml --init_weights dit

`lit-diffusion convert export --help` and `convert import --help` list the options."""

DTYPES = ("float32", "float16", "bfloat16")
KINDS = ("improved-diffusion", "guided-diffusion", "uvit", "dit", "diffusers-unet")


def build_parser(name: str = "") -> Parser:
    """Build the parser of `convert`, or of its subcommand `name` ("export" or "import")."""
    builders = {"export": _export_parser, "import": _import_parser}
    return builders[name]() if name in builders else Parser("convert", DESCRIPTION)


def _export_parser() -> Parser:
    parser = Parser(
        "convert export",
        """Write the network of a checkpoint for other programs.

    safetensors  network.safetensors, and network.json, which says how to build the network;
                 lit_diffusion.interchange.load_network(DIR) reads both with torch alone, and
                 other commands accept DIR as a checkpoint
    diffusers    a folder for DDPMPipeline.from_pretrained (UNet) or DiTPipeline (DiT). A
                 model that diffusers cannot express raises an error. If diffusers is
                 installed, the pipeline's images of two seeds are compared with the run's

Both write README.md, a model card for the Hugging Face Hub with the FIDs of the run, unless there
is one already.""",
    )
    add_checkpoint(parser, required=True)
    add, forms = parser.add_argument, ("safetensors", "diffusers")
    add("--out", required=True, metavar="DIR", help="folder for the files")
    text = "safetensors (default) or diffusers"
    add("--format", default=forms[0], choices=forms, metavar="F", help=text)
    text = "safetensors: float32, float16 or bfloat16 in the file (default: as in the run)"
    add("--dtype", choices=DTYPES, metavar="T", help=text)
    text = "license in the model card, in the spelling of the Hub: mit, cc-by-4.0, ..."
    add("--license", metavar="NAME", help=text)
    text = "diffusers: AutoencoderKL to include with a DiT that was trained on latents"
    add("--vae", metavar="DIR", help=text)
    text = "diffusers: do not compare images from the pipeline with images from the run"
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
    """Run the command: "convert", "export" or "import", then options."""
    match argv[1:2]:
        case ["export"]:
            args = build_parser("export").parse_args(argv[2:])
            check_checkpoints(args.checkpoint)
            options = args.weights, args.format, args.vae, args.trust, not args.no_comparison
            card = {"dtype": args.dtype, "license": args.license}
            print(export(args.checkpoint, args.out, *options, **card))
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
    *,
    dtype: str | None = None,
    license: str | None = None,
    name: str | None = None,
    notes: str = "",
) -> str:
    """Write the network of a checkpoint, with a model card. Return text for the user.

    Args:
        checkpoint: checkpoint file, run folder, exported folder, or name of a packaged model.
        folder: folder to write.
        weights: "ema", "raw", "ema_<decay>" or "power_<width>".
        form: "safetensors" (see `interchange.exported`) or "diffusers" (see
            `interchange.diffusers_folder`).
        vae: folder of the AutoencoderKL to include with a latent DiT in the form "diffusers".
        trust: packages and folders that the checkpoint may name, as in `checkpoints.load`.
        compare: whether to compare the diffusers pipeline with the run, on images of two seeds.
        dtype: one of `DTYPES`, for the weights in the form "safetensors". None keeps their dtypes.
        license: license of the weights in the model card. None omits the license.
        name: name of the model in the model card. None means the name of `folder`.
        notes: Markdown to add to the model card.

    Raises:
        ValueError: if the checkpoint does not describe its network, or if diffusers does not
            support the model.
    """
    import torch
    from torch import nn

    from lit_diffusion.checkpoints.loading import load_module, model_spec, read_class_names
    from lit_diffusion.cli.run_data import evaluations_of_run
    from lit_diffusion.interchange.diffusers_folder import compare_with_pipeline, write_diffusers
    from lit_diffusion.interchange.exported import module_record, write_network
    from lit_diffusion.interchange.model_card import CARD, model_card, write_model_card

    if vae is not None and form != "diffusers":
        raise ValueError(f"--vae {vae} belongs to --format diffusers; leave it out.")
    if dtype is not None and form != "safetensors":
        raise ValueError(f"--dtype {dtype} belongs to --format safetensors; leave it out.")
    loaded = load_module(checkpoint, weights, trust=trust)
    spec = model_spec(loaded.checkpoint) or {"class_path": "", "init_args": {}}
    network = getattr(loaded.module, "network", None)
    if not isinstance(network, nn.Module) or not isinstance(spec["init_args"].get("network"), dict):
        raise ValueError(
            f"{loaded.path} does not record the class and arguments of its network; export a run "
            "of a config whose model has a network."
        )
    record = module_record(spec) | {"step": loaded.step, "weights": loaded.weights}
    if isinstance(codec := loaded.checkpoint.get("codec"), dict):
        record["codec"] = codec
    if class_names := read_class_names(loaded.checkpoint):
        record["class_names"] = class_names
    data = model_spec(loaded.checkpoint, "datamodule_hyper_parameters") or {}
    if class_path := data.get("class_path", loaded.checkpoint.get("data")):
        record["data"] = str(class_path)
    state = dict(network.state_dict())
    remarks = []
    if form == "diffusers":
        remarks = write_diffusers(folder, loaded.module, record, state, vae)
    else:
        write_network(folder, state, record, None if dtype is None else getattr(torch, dtype))
    card = model_card(
        record,
        evaluations_of_run(loaded.path),
        name=name or Path(folder).resolve().name,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        form=form,
        license=license,
        notes=notes,
    )
    if not write_model_card(Path(folder), card):
        remarks.append(f"{folder}/{CARD} was there already and is not changed.")
    lines = [f"{loaded.weights} weights of {loaded.path} are in {folder}.", *remarks]
    if form == "diffusers" and compare:
        lines.append(compare_with_pipeline(folder, loaded.module))
    return "\n".join(lines)


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
    file = Path(args.out) / "model.yaml"
    fit = f"lit-diffusion fit --config CONFIG --config {quote(str(file))}"
    fit += f" --init_weights {quote(args.out)}"
    atomic_write_text(file, f"# {fit}\n{model}")
    print(f"To train it further, with a CONFIG of process, loss and data: {fit}")
