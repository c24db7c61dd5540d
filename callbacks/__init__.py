"""Callbacks for Lightning modules: weight averages, samples, scores, random seeds, schedules.

A class is imported when it is first accessed. Importing one callback therefore does not import the
files of the other callbacks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the classes of _FILES, in a form that type checkers understand
    from .adaptive_timesteps import AdaptiveTimesteps as AdaptiveTimesteps
    from .consistency_probe import ConsistencyProbe as ConsistencyProbe
    from .curriculum import CurriculumWeight as CurriculumWeight
    from .curriculum import ImportanceWeightedCurriculum as ImportanceWeightedCurriculum
    from .curriculum import TimestepCurriculum as TimestepCurriculum
    from .ema import EMA as EMA
    from .fid import FIDEvaluation as FIDEvaluation
    from .finite_updates import FiniteUpdates as FiniteUpdates
    from .gradient_diagnostics import GradientDiagnostics as GradientDiagnostics
    from .info_noise import InfoNoise as InfoNoise
    from .loss_resampler import LossDensity as LossDensity
    from .loss_resampler import LossSecondMomentResampler as LossSecondMomentResampler
    from .momentum_decay import LRCompensation as LRCompensation
    from .momentum_decay import MomentumDecay as MomentumDecay
    from .noise_level_loss import NoiseLevelLoss as NoiseLevelLoss
    from .power_ema import PowerEMA as PowerEMA
    from .rank_watch import RankWatch as RankWatch
    from .sample_grid import SampleGrid as SampleGrid
    from .save_on_signal import SaveOnSignal as SaveOnSignal
    from .step_seed import StepSeed as StepSeed

_FILES = {
    "AdaptiveTimesteps": "adaptive_timesteps",
    "ConsistencyProbe": "consistency_probe",
    "CurriculumWeight": "curriculum",
    "EMA": "ema",
    "FIDEvaluation": "fid",
    "FiniteUpdates": "finite_updates",
    "GradientDiagnostics": "gradient_diagnostics",
    "ImportanceWeightedCurriculum": "curriculum",
    "InfoNoise": "info_noise",
    "LRCompensation": "momentum_decay",
    "LossDensity": "loss_resampler",
    "LossSecondMomentResampler": "loss_resampler",
    "MomentumDecay": "momentum_decay",
    "NoiseLevelLoss": "noise_level_loss",
    "PowerEMA": "power_ema",
    "RankWatch": "rank_watch",
    "SampleGrid": "sample_grid",
    "SaveOnSignal": "save_on_signal",
    "StepSeed": "step_seed",
    "TimestepCurriculum": "curriculum",
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    globals()[name] = value
    return value
