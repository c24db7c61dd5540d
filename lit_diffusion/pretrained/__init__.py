"""Trained models in the package, in the folder format of `lit-diffusion convert export`.

The script `tests/benchmarks/package_model.py` writes the folders of the models. Importing this
module does not import torch.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def list_models() -> list[str]:
    """Return the sorted names of the models in the package.

    Example:
        >>> list_models()
        ['digits', 'mnist']
    """
    return sorted(file.parent.name for file in FOLDER.glob("*/network.json"))


def find_model(name: str | Path) -> Path | None:
    """Return the folder of the model `name`, or None if the package has no such model.

    Example:
        >>> find_model("digits").name, find_model("runs/digits")
        ('digits', None)
    """
    return FOLDER / name if str(name) in list_models() else None


def is_packaged(folder: Path) -> bool:
    """Whether `folder` is the folder of a model in the package."""
    return folder.parent.resolve() == FOLDER.resolve() and folder.name in list_models()
