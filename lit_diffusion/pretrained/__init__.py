"""Trained models that ship with the package: folders in the format of `convert export`.

`tests/benchmarks/package_model.py` writes these folders. Importing this file does not import torch.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def list_models() -> list[str]:
    """Names of the models in the package, sorted.

    Example:
        >>> list_models()
        ['digits', 'mnist']
    """
    return sorted(file.parent.name for file in FOLDER.glob("*/network.json"))


def find_model(name: str | Path) -> Path | None:
    """Folder of the model `name`; None if the package has no such model.

    Example:
        >>> find_model("digits").name, find_model("runs/digits")
        ('digits', None)
    """
    return FOLDER / name if str(name) in list_models() else None


def is_packaged(folder: Path) -> bool:
    """Whether `folder` is one that `find_model` returns."""
    return folder.parent.resolve() == FOLDER.resolve() and folder.name in list_models()
