"""lit-diffusion: PyTorch Lightning modules and callbacks for training diffusion models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_diffusion.checkpoints import load

__all__ = ["load"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import `load`, and torch with it, at its first use."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_diffusion.checkpoints import load

    return load
