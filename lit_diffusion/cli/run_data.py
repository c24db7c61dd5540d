"""Data, reference images and FID protocol of the run of a checkpoint.

A data module can read any path or bucket. Therefore the data that a checkpoint itself names are
never opened, but only those of the config in its run folder or of --data CONFIG.
"""

from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_diffusion.checkpoints.loading import checkpoint_file, instantiate
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.options import SPLITS, check_exists
from lit_diffusion.cli.run_folder import latest_config, read_config, run_of
from lit_diffusion.metrics.extractors import InceptionV3Compat
from lit_diffusion.metrics.images import HasSplits, ImageSet, open_images, open_split


def read_data_settings(
    checkpoint: str | Path | None, configs: Sequence[str] | None
) -> tuple[list[dict[str, Any]], str]:
    """Read the entries data: of `configs`, or else of the checkpoint's run; also returns the path.

    Raises:
        FileNotFoundError: if a config does not exist.
        ValueError: if the checkpoint is in no run folder with a config, and `configs` is None.
    """
    root = run_folder_of(checkpoint) if checkpoint else None
    file = latest_config(root) if root else None
    files = configs or ([] if file is None else [str(file)])
    if not files and checkpoint and not checkpoint_file(checkpoint).exists():
        raise FileNotFoundError(f"There is no checkpoint at {checkpoint_file(checkpoint)}.")
    if not files:
        raise ValueError(
            f"{checkpoint} is in no run folder with a config.yaml, and the data that a checkpoint "
            "itself names are not opened: pass --data CONFIG, a config whose data: to read."
        )
    check_exists("config", *files)
    settings = [read_config(file).get("data") for file in files]
    return [entry for entry in settings if entry], ", ".join(files)


def build_data(
    settings: Sequence[dict[str, Any]],
    trust: Sequence[str],
    path: str | Path,
    options: Sequence[str] = (),
) -> Any:
    """Build and prepare the data module of configs; None if it has no splits.

    Later settings override earlier ones as in `fit`, and `options`, such as
    --data.init_args.NAME=VALUE, override them all. `path` is for error messages.
    """
    if not (settings or options):
        return None
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
    """Real images to compare with, and other real images, or None, for the floor of the FID.

    `reference` is a split "train", "val" or "test" of `data_of_run`, or a folder or .npz file,
    which has no other images. None means "val", or for latents the reference of the run's last
    evaluation.
    """
    if reference is not None and reference not in SPLITS:
        return ImageSet(reference, open_images(reference)), None
    data = data_of_run(checkpoint, configs, trust)
    if data is None:
        source = ", ".join(configs or [str(checkpoint)])
        raise ValueError(
            f"{source} names no data with splits to compare with; pass --reference DIR, a folder "
            "of real images."
        )
    if reference is None and hasattr(data, "vae_sha256"):
        records = [each for each in _evaluations_of_run(checkpoint) if "reference" in each]
        if not records:
            raise ValueError(
                f"{checkpoint or 'the model'} was trained on latents; pass --reference DIR, a "
                "folder of real images."
            )
        return real_images(str(records[-1]["reference"]), checkpoint, configs, trust)
    split = reference or "val"
    other_split = "val" if split == "train" else "train"
    return open_split(data, split), open_split(data, other_split)


def protocol_of_run(checkpoint: str | None) -> str:
    """Name of the FID protocol of a run: of its last evaluation, else of its config.

    For an extractor that was trained, it is the path of its copy in the run folder.
    """
    root = run_folder_of(checkpoint) if checkpoint else None
    if root is None:
        return InceptionV3Compat.name
    protocols = [each["protocol"] for each in _evaluations_of_run(checkpoint) if "protocol" in each]
    name = str(protocols[-1]) if protocols else _configured_extractor(root)
    stem = Path(name).name.removesuffix(".safetensors")  # of no other folder
    # The copy of a file that a config names has its hash behind the name.
    is_copied = not protocols and name.endswith(".safetensors")
    copies = sorted(root.glob(f"{escape(stem)}{'-*' if is_copied else ''}.safetensors"))
    return str(copies[-1]) if copies else stem


def _configured_extractor(root: Path) -> str:
    """Extractor of the first FIDEvaluation in the config of a run folder, or the usual one."""
    file = latest_config(root)
    trainer = (read_config(file) if file else {}).get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    for callback in callbacks if isinstance(callbacks, list) else []:
        if isinstance(callback, dict) and str(callback.get("class_path")).endswith("FIDEvaluation"):
            extractor = callback["init_args"]["extractor"]
            if isinstance(extractor, str):
                return extractor
            arguments = extractor.get("init_args") or {}
            return str(arguments.get("name") or arguments.get("path") or InceptionV3Compat.name)
    return InceptionV3Compat.name


def run_folder_of(checkpoint: str | Path) -> Path | None:
    """The run folder of a checkpoint, which may be the folder itself; None for other files."""
    return run_of(checkpoint_file(checkpoint).absolute())


def _evaluations_of_run(checkpoint: str | None) -> list[dict[str, Any]]:
    root = run_folder_of(checkpoint) if checkpoint else None
    return read_evaluations(root / "evaluations.jsonl") if root else []
