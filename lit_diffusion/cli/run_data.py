"""Data, reference images and FID protocol of the run of a checkpoint.

A checkpoint may come from somebody else, and a data module can read any path or bucket. Therefore,
the data settings in a checkpoint are never used. Data are opened only if --data CONFIG, or the
config in the checkpoint's run folder, names them.
"""

from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_diffusion.checkpoints.loading import checkpoint_file, instantiate
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.options import SPLITS
from lit_diffusion.cli.run_folder import latest_config, read_config, run_of
from lit_diffusion.config.trust import is_within
from lit_diffusion.files import check_option_values
from lit_diffusion.metrics.extractors import InceptionV3Compat
from lit_diffusion.metrics.images import HasSplits, ImageSet, open_images, open_split
from lit_diffusion.metrics.vision_transformers import CLIP, DINOv2
from lit_diffusion.pretrained import is_packaged


def read_data_settings(
    checkpoint: str | Path | None, configs: Sequence[str] | None
) -> tuple[list[dict[str, Any]], str]:
    """Read the `data` sections of `configs`, or of the run's config if there are no `configs`.

    Also return the paths of the configs as text for messages. A ValueError is raised if there are
    no `configs` and the checkpoint is not in a run folder that contains a config.
    """
    root = run_folder_of(checkpoint) if checkpoint else None
    file = latest_config(root) if root else None
    files = configs or ([] if file is None else [str(file)])
    if not files:
        raise ValueError(
            f"{checkpoint} is in no run folder with a config.yaml, and data that a checkpoint "
            "names are not opened; add --data CONFIG with a config that names the data."
        )
    settings = [read_config(file).get("data") for file in files]
    return [entry for entry in settings if entry], ", ".join(files)


def build_data(
    settings: Sequence[dict[str, Any]],
    trust: Sequence[str],
    path: str | Path,
    options: Sequence[str] = (),
) -> Any:
    """Build and prepare the data module of configs; return None if it has no splits.

    As in `fit`, later settings override earlier settings. The `options`, such as
    "--data.init_args.NAME=VALUE", override all of them. Error messages name `path` as the file of
    the settings.
    """
    if not (settings or options):
        return None
    check_option_values(options)
    data = instantiate(settings, LightningDataModule, trust, path, options, key="data")
    data.prepare_data()
    return data if isinstance(data, HasSplits) else None


def data_of_run(
    checkpoint: str | Path | None, configs: Sequence[str] | None, trust: Sequence[str]
) -> Any:
    """The prepared data module of `read_data_settings`; None if it has no splits."""
    settings, path = read_data_settings(checkpoint, configs)
    return build_data(settings, trust, path)


def real_images(
    reference: str | None,
    checkpoint: str | None,
    configs: Sequence[str] | None,
    trust: Sequence[str],
) -> tuple[ImageSet, ImageSet | None]:
    """Return the reference images, and other real images, whose FID is reported for comparison.

    The argument `reference` is a split of the run's data ("train", "val" or "test"), a folder or an
    .npz file. For a model of latents, None means the reference of the run's last evaluation. For
    any other model, None means "val". The second image set that the function returns is the split
    "train", or "val" if the reference is "train". The second image set is None if the reference is
    a folder or an .npz file.
    """
    if reference is not None and reference not in SPLITS:
        return ImageSet(reference, open_images(reference)), None
    data, fix = data_of_run(checkpoint, configs, trust), "add --reference DIR with real images."
    if data is None:
        source = ", ".join(configs or [str(checkpoint)])
        raise ValueError(f"{source} names no data with splits to compare with; {fix}")
    if reference is None and hasattr(data, "vae_sha256"):
        records = [each for each in evaluations_of_run(checkpoint) if "reference" in each]
        if not records:
            raise ValueError(f"{checkpoint or 'the model'} was trained on latents; {fix}")
        return real_images(str(records[-1]["reference"]), checkpoint, configs, trust)
    split = reference or "val"
    other_split = "val" if split == "train" else "train"
    return open_split(data, split), open_split(data, other_split)


def protocol_of_run(checkpoint: str | None) -> str:
    """Name of a run's FID protocol, from its last evaluation or else from its config.

    If the run folder contains a copy of the protocol's feature extractor, the function returns the
    path of this copy instead of the name. It never returns a path outside the run folder. If the
    run has no evaluations, the extractor in its config must be shipped with lit-diffusion, or have
    exactly one copy in the run folder.
    """
    root = run_folder_of(checkpoint) if checkpoint else None
    if root is None:
        return InceptionV3Compat.name
    protocols = [each["protocol"] for each in evaluations_of_run(checkpoint) if "protocol" in each]
    if not protocols:
        return _protocol_of_config(root)
    name = Path(str(protocols[-1])).name.removesuffix(".safetensors")
    copy = root / f"{name}.safetensors"
    return str(copy) if copy.exists() else name


def _protocol_of_config(root: Path) -> str:
    """Name, or path of the copy, of the extractor in a run's config; InceptionV3Compat if none."""
    file = latest_config(root)
    callbacks = ((read_config(file) if file else {}).get("trainer") or {}).get("callbacks")
    extractor: Any = InceptionV3Compat.name
    for callback in reversed(callbacks if isinstance(callbacks, list) else [callbacks]):
        if isinstance(callback, dict) and str(callback.get("class_path")).endswith("FIDEvaluation"):
            extractor = (callback.get("init_args") or {}).get("extractor")
    name, fix = _extractor_name(extractor), "name one by --extractor of `evaluate` or `analyze`"
    if name is None:
        raise ValueError(
            f"without evaluations, the extractor in {file} must be a shipped one or a .safetensors "
            f"file, got {extractor!r:.200}; {fix}."
        )
    if not name.endswith(".safetensors"):
        return name
    # FIDEvaluation has appended 8 hex digits of the file's hash to the name of the copy.
    copies = sorted(root.glob(f"{escape(Path(name).stem)}-{'[0-9a-f]' * 8}.safetensors"))
    if len(copies) != 1:
        names = ", ".join(copy.name for copy in copies) or "none"
        raise ValueError(f"{root} must hold one copy of its extractor {name}, has {names}; {fix}.")
    return str(copies[0])


def _extractor_name(extractor: Any) -> str | None:
    """Name or file of an extractor in a config; None if it has neither."""
    if isinstance(extractor, str):
        return extractor
    spec = extractor if isinstance(extractor, dict) else {}
    package, _, kind = str(spec.get("class_path")).rpartition(".")
    arguments = spec.get("init_args") or {}
    if package and not is_within(package, ["lit_diffusion"]):
        return None
    for protocol in (InceptionV3Compat(), DINOv2(), CLIP()):
        if kind == type(protocol).__name__ and arguments.items() <= vars(protocol).items():
            return protocol.name
    name = arguments.get({"EmbeddedCNN": "name", "TrainedCNN": "path"}.get(kind))
    return None if name is None else str(name)


def run_folder_of(checkpoint: str | Path) -> Path | None:
    """Return the run folder of a checkpoint; None if the checkpoint is not in a run folder.

    The argument may also be the run folder itself. The folder of a packaged model counts as a run
    folder, because it has the config and the evaluations of the model's run.
    """
    file = checkpoint_file(checkpoint).absolute()
    return file if is_packaged(file) else run_of(file)


def evaluations_of_run(checkpoint: str | Path | None) -> list[dict[str, Any]]:
    """The lines of evaluations.jsonl of a checkpoint's run; empty without a run."""
    root = run_folder_of(checkpoint) if checkpoint else None
    return read_evaluations(root / "evaluations.jsonl") if root else []
