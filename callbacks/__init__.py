"""Callbacks for any LightningModule: averages of the weights, samples, scores, seeds."""

from importlib import import_module
from typing import Any

_HOMES = {
    "EMA": "ema",
    "FIDEvaluation": "fid",
    "NoiseLevelLoss": "noise_level_loss",
    "SampleGrid": "sample_grid",
    "StepSeed": "step_seed",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a callback when it is asked for: FIDEvaluation alone needs torch-fidelity."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
