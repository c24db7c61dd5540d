"""Write model cards in the format of the Hugging Face Hub: README.md with a YAML header."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion import __version__
from lit_diffusion.files import atomic_write_text

CARD = "README.md"

Json = dict[str, Any]


def write_model_card(folder: Path, text: str) -> bool:
    """Write a model card unless the folder has one, and return whether it was written."""
    path = folder / CARD
    if path.exists():
        return False
    atomic_write_text(path, text)
    return True


def model_card(
    record: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    name: str,
    num_parameters: int,
    form: str = "safetensors",
    license: str | None = None,
    notes: str = "",
) -> str:
    """Return the text of the model card of an exported network.

    Args:
        record: record of the exported network. Its entry "data" is the class path of the data
            module.
        evaluations: lines of evaluations.jsonl of the run. The card lists only scores of the
            exported weights at the exported step.
        name: name of the model.
        num_parameters: number of parameters of the network.
        form: "safetensors" for an exported network, or "diffusers" for a pipeline of diffusers.
        license: identifier of the license on the Hub, such as "mit". None omits the license.
        notes: Markdown text to insert before the scores.

    Example:
        >>> record = {"network": {"class_path": "my.Net"}, "step": 600, "weights": "raw"}
        >>> model_card(record, [], name="mine", num_parameters=7).splitlines()[1]
        'library_name: lit-diffusion'
    """
    scored = [each for each in evaluations if _is_of(each, record)]
    head = yaml.safe_dump(_head(record, scored, name, form, license), sort_keys=False)
    sections = [
        f"---\n{head}---",
        f"# {name}\n\n{_summary(record)}",
        f"## How to use it\n\n{_usage(record, form)}",
        f"## How it was trained\n\n{_training(record, scored, num_parameters)}",
        notes.strip(),
        f"## Scores\n\n{_scores(scored)}",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _is_of(evaluation: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether a line of evaluations.jsonl is an FID of the exported weights on seeds 0, 1, ..."""
    kind, _, decay = str(record.get("weights", "raw")).partition("_")
    is_same_decay = evaluation.get("ema_decay") is None or decay == f"{evaluation['ema_decay']:g}"
    is_same = evaluation.get("weights") == record.get("weights")
    is_same |= evaluation.get("weights") == kind and (kind == "raw" or is_same_decay)
    is_fid = isinstance(evaluation.get("value"), int | float) and "num_fake" in evaluation
    is_first = evaluation.get("seeds", [0])[0] == 0
    return is_fid and is_same and is_first and evaluation.get("step") == record.get("step")


def _head(
    record: Mapping[str, Any],
    scored: Sequence[Mapping[str, Any]],
    name: str,
    form: str,
    license: str | None,
) -> Json:
    """Entries of the YAML header. Source: Hugging Face Hub's documentation of model cards."""
    head: Json = {"library_name": "diffusers" if form == "diffusers" else "lit-diffusion"}
    if license is not None:
        head["license"] = license
    tags = ["diffusion", "image-generation", "pytorch", "lightning", "lit-diffusion"]
    tags += ["class-conditional"] * bool(record.get("num_classes"))
    head |= {"pipeline_tag": "unconditional-image-generation", "tags": tags}
    if not scored:
        return head
    distances = [_distance(each) for each in scored]
    head["metrics"] = sorted(set(distances))
    data = _class_name(record.get("data") or "images")
    results = [
        {
            "task": {"type": "unconditional-image-generation", "name": "Image generation"},
            "dataset": {"type": data.lower(), "name": data, "split": str(each["reference"])},
            "metrics": [
                {
                    "type": distance,
                    "name": f"{distance.upper().replace('_', '-')} of {each['num_fake']} images "
                    f"by {each['protocol']}",
                    "value": round(float(each["value"]), 4),
                }
            ],
        }
        for each, distance in zip(scored, distances, strict=True)
    ]
    return head | {"model-index": [{"name": name, "results": results}]}


def _distance(evaluation: Mapping[str, Any]) -> str:
    """Name of the distance in a line of evaluations.jsonl, such as "fid" or "fd_dinov2"."""
    words = str(evaluation.get("metric")).rpartition("/")[2].split("_")
    return "_".join(words[:2]) if words[0] == "fd" else "fid"


def _class_name(path: Any) -> str:
    return str(path).rpartition(".")[2]


def _spec_text(spec: Any) -> str:
    """A class path with its arguments as a call: `MinSNR(gamma=5.0)`."""
    if isinstance(spec, str):
        return _class_name(spec) if "." in spec else spec
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        return json.dumps(spec)
    arguments = spec.get("init_args") or {}
    parts = [f"{key}={_spec_text(value)}" for key, value in arguments.items() if value is not None]
    return f"{_class_name(spec['class_path'])}({', '.join(parts)})"


def _summary(record: Mapping[str, Any]) -> str:
    shape = record.get("image_shape")
    images = "images"
    if shape:
        images = f"images of {shape[1]}x{shape[2]} pixels and {shape[0]} channel"
        images += "s" * (shape[0] != 1)
        if "codec" in record:
            images = f"latents of {shape[0]} channels, {shape[1]}x{shape[2]}"
    text = f"A diffusion model of {images}"
    if num := record.get("num_classes"):
        text += f", in {num} classes"
    return f"{text}. It was trained with lit-diffusion {__version__}."


def _usage(record: Mapping[str, Any], form: str) -> str:
    if form == "diffusers":
        code = "from diffusers import DiffusionPipeline\n\n"
        code += 'pipeline = DiffusionPipeline.from_pretrained("FOLDER")'
        return f"`FOLDER` is the folder of this file.\n\n```python\n{code}\n```"
    weights = "" if str(record.get("weights")).startswith("ema") else f", {record['weights']!r}"
    code = f'from lit_diffusion import load\n\nimages = load("FOLDER"{weights}).generate(range(64))'
    if num := record.get("num_classes"):
        code += f"  # seed s gives class s % {num}"
    option = weights and f" --weights {record['weights']}"
    return (
        "`FOLDER` is the folder of this file. To load only the network, which needs only torch and "
        "safetensors, call\n`lit_diffusion.interchange.load_network`.\n\n"
        f"```bash\nlit-diffusion sample --checkpoint FOLDER{option} --num 64 --out samples\n```\n\n"
        f"```python\n{code}\n```"
    )


def _training(
    record: Mapping[str, Any], scored: Sequence[Mapping[str, Any]], num_parameters: int
) -> str:
    arguments = {**(record.get("module") or {}).get("init_args", {}), **record}
    network = record["network"]
    rows = {"network": f"`{_class_name(network['class_path'])}`"}
    if isinstance(inner := (network.get("init_args") or {}).get("network"), Mapping):
        rows["network"] += f" of `{_class_name(inner.get('class_path'))}`"
    rows["network"] += f", {num_parameters:,} parameters"
    if "data" in record:
        rows["data"] = f"`{record['data']}`"
    rows["steps"] = f"{record.get('step', 0):,}"
    images = [each["images"] for each in scored if each.get("images")]
    if images:
        rows["training images, with repetitions"] = f"{images[-1]:,}"
    rows["weights"] = f"`{record.get('weights', 'raw')}`"
    names = ("process", "parameterization", "loss", "times", "solver", "optimizer", "lr_scheduler")
    for key in names:
        if arguments.get(key) is not None:
            rows[key] = f"`{_spec_text(arguments[key])}`"
    lines = ["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows.items())]
    return "\n".join(lines)


def _scores(scored: Sequence[Mapping[str, Any]]) -> str:
    if not scored:
        return "The run has no score of these weights at this step."
    lines = [
        "Compare an FID only with an FID that was computed with the same extractor, the same real "
        'images and the same number\nof generated images. The column "FID of real images" is the '
        "FID that other real images have in place of the\ngenerated images.",
        "",
        "| FID | FID of real images | generated images | real images | extractor |",
        "|---|---|---|---|---|",
    ]
    for each in scored:
        floor = each.get("floor")
        floor = "" if floor is None else f"{floor:.4g}"
        lines.append(
            f"| {each['value']:.4g} | {floor} | {each['num_fake']:,} | "
            f"{each['num_real']:,} ({each['reference']}) | {each['protocol']} |"
        )
    others: Mapping[str, Any] = scored[-1].get("second_look") or {}
    names = ("precision", "recall", "memorized")
    texts = [f"{key} {others[key]:.3f}" for key in names if others.get(key) is not None]
    if texts:
        lines += ["", f"Other metrics of the same images: {', '.join(texts)}."]
    if others.get("memorized") is not None:
        lines += [
            "Here, memorized is the fraction of generated images whose pixel distance to the "
            "nearest training image is at most the\nmedian of this distance over the held-out "
            "images. New images would have about 0.5, and copies of training images 1."
        ]
    return "\n".join(lines)
