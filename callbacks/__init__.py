"""Callbacks for any LightningModule: averages of the weights, samples, scores, seeds, schedules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_diffusion.callbacks.curriculum import (
        CurriculumWeight,
        ImportanceWeightedCurriculum,
        ShiftingGaussian,
        TimestepCurriculum,
    )
    from lit_diffusion.callbacks.ema import EMA
    from lit_diffusion.callbacks.fid import FIDEvaluation
    from lit_diffusion.callbacks.finite_updates import FiniteUpdates
    from lit_diffusion.callbacks.loss_resampler import LossSecondMomentResampler
    from lit_diffusion.callbacks.momentum_decay import LRCompensation, MomentumDecay
    from lit_diffusion.callbacks.noise_level_loss import NoiseLevelLoss
    from lit_diffusion.callbacks.rank_watch import RankWatch
    from lit_diffusion.callbacks.sample_grid import SampleGrid
    from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
    from lit_diffusion.callbacks.step_seed import StepSeed

__all__ = [
    "EMA",
    "CurriculumWeight",
    "FIDEvaluation",
    "FiniteUpdates",
    "ImportanceWeightedCurriculum",
    "LRCompensation",
    "LossSecondMomentResampler",
    "MomentumDecay",
    "NoiseLevelLoss",
    "RankWatch",
    "SampleGrid",
    "SaveOnSignal",
    "ShiftingGaussian",
    "StepSeed",
    "TimestepCurriculum",
]

_FILES = {
    "CurriculumWeight": "curriculum",
    "EMA": "ema",
    "FIDEvaluation": "fid",
    "FiniteUpdates": "finite_updates",
    "ImportanceWeightedCurriculum": "curriculum",
    "LRCompensation": "momentum_decay",
    "LossSecondMomentResampler": "loss_resampler",
    "MomentumDecay": "momentum_decay",
    "NoiseLevelLoss": "noise_level_loss",
    "RankWatch": "rank_watch",
    "SampleGrid": "sample_grid",
    "SaveOnSignal": "save_on_signal",
    "ShiftingGaussian": "curriculum",
    "StepSeed": "step_seed",
    "TimestepCurriculum": "curriculum",
}


def __getattr__(name: str) -> Any:
    """Import a callback when it is asked for, and nothing that only others need."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
