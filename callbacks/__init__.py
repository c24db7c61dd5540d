"""Callbacks for any LightningModule: averages of the weights, samples, scores, seeds, schedules."""

from lit_diffusion.callbacks.consistency_probe import ConsistencyProbe
from lit_diffusion.callbacks.curriculum import (
    CurriculumWeight,
    ImportanceWeightedCurriculum,
    ShiftingGaussian,
    TimestepCurriculum,
)
from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.callbacks.gradient_diagnostics import GradientDiagnostics
from lit_diffusion.callbacks.loss_resampler import LossDensity, LossSecondMomentResampler
from lit_diffusion.callbacks.momentum_decay import LRCompensation, MomentumDecay
from lit_diffusion.callbacks.noise_level_loss import NoiseLevelLoss
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.callbacks.rank_watch.callback import RankWatch
from lit_diffusion.callbacks.sample_grid import SampleGrid
from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
from lit_diffusion.callbacks.step_seed import StepSeed

__all__ = [
    "EMA",
    "ConsistencyProbe",
    "CurriculumWeight",
    "FIDEvaluation",
    "FiniteUpdates",
    "GradientDiagnostics",
    "ImportanceWeightedCurriculum",
    "LRCompensation",
    "LossDensity",
    "LossSecondMomentResampler",
    "MomentumDecay",
    "NoiseLevelLoss",
    "PowerEMA",
    "RankWatch",
    "SampleGrid",
    "SaveOnSignal",
    "ShiftingGaussian",
    "StepSeed",
    "TimestepCurriculum",
]
