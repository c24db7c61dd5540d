"""The data of a run, its reference images and its FID protocol, for a command with --checkpoint.

A data module reads any path or bucket that it is given. So what a checkpoint itself says of its
data is never opened: the config of its run folder decides, or --data CONFIG of the user.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_diffusion.checkpoints.loading import checkpoint_file, instantiate
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.run_folder import latest_config, read_config, run_of
from lit_diffusion.metrics.images import HasSplits, ImageSet, open_images, open_split

SPLITS = ("train", "val", "test")


def read_data_settings(checkpoint: str | Path | None, config: str | None) -> tuple[Any, Path]:
    """What the config of a checkpoint's run has under data:, or else `config`, and its path.

    Raises:
        FileNotFoundError: where there is no such config.
        ValueError: where the checkpoint is in no run folder with a config, and none was given.
    """
    root = run_folder_of(checkpoint) if checkpoint else None
    file = Path(config) if config else latest_config(root) if root else None
    if file is None and checkpoint and not checkpoint_file(checkpoint).exists():
        raise FileNotFoundError(f"There is no checkpoint at {checkpoint_file(checkpoint)}.")
    if file is None:
        raise ValueError(
            f"{checkpoint} is in no run folder with a config.yaml, and the data that a checkpoint "
            "itself names are not opened: pass --data CONFIG, a config whose data: to read."
        )
    if not file.exists():
        raise FileNotFoundError(f"There is no config {file}.")
    return read_config(file).get("data"), file


def build_data(
    settings: Any, trust: Sequence[str], path: str | Path, options: Sequence[str] = ()
) -> Any:
    """The prepared data module of a config, whose `path` is for messages; None without splits.

    `options`, as --data.init_args.NAME=VALUE, win over the settings.
    """
    if not settings:
        return None
    data = instantiate(settings, LightningDataModule, trust, path, options)
    data.prepare_data()
    return data if isinstance(data, HasSplits) else None


def data_of_run(checkpoint: str | Path | None, config: str | None, trust: Sequence[str]) -> Any:
    """The prepared data module that `read_data_settings` names; None where it has no splits."""
    settings, path = read_data_settings(checkpoint, config)
    return build_data(settings, trust, path)


def real_images(
    reference: str | None, checkpoint: str | None, config: str | None, trust: Sequence[str]
) -> tuple[ImageSet, ImageSet | None]:
    """Real images to compare with, and others of the same kind for the floor of the FID.

    `reference` is the split "train", "val" or "test" of the data of `data_of_run`, or a folder or
    .npz, for which there are no others. None is "val", or for latents what the run was scored
    against.
    """
    if reference is not None and reference not in SPLITS:
        return ImageSet(reference, open_images(reference)), None
    data = data_of_run(checkpoint, config, trust)
    if data is None:
        raise ValueError(
            f"{config or checkpoint} names no data with splits to compare with; pass "
            "--reference DIR, a folder of real images."
        )
    if reference is None and hasattr(data, "vae_sha256"):
        records = _evaluations_of_run(checkpoint)
        if not records:
            raise ValueError(
                f"{checkpoint or 'the model'} was trained on latents; pass --reference DIR, a "
                "folder of real images."
            )
        return real_images(str(records[-1]["reference"]), checkpoint, config, trust)
    split = reference or "val"
    other_split = "val" if split == "train" else "train"
    return open_split(data, split), open_split(data, other_split)


def protocol_of_run(checkpoint: str | None) -> str:
    """The FID protocol of a run's evaluations, or its file in the run folder, else the default."""
    protocols = [each["protocol"] for each in _evaluations_of_run(checkpoint) if "protocol" in each]
    if checkpoint is None or not protocols:
        return "inception-v3-compat"
    root = run_folder_of(checkpoint)
    file = root / f"{protocols[-1]}.safetensors" if root else None
    return str(file) if file and file.is_file() else str(protocols[-1])


def run_folder_of(checkpoint: str | Path) -> Path | None:
    """The run folder of a checkpoint, or `checkpoint` itself if it is one; None for a lone file."""
    return run_of(checkpoint_file(checkpoint).absolute())


def _evaluations_of_run(checkpoint: str | None) -> list[dict[str, Any]]:
    root = run_folder_of(checkpoint) if checkpoint else None
    return read_evaluations(root / "evaluations.jsonl") if root else []
