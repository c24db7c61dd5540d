"""Runs that die after a step and are resumed, and what they leave behind."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lit_diffusion.callbacks import (
    EMA,
    AdaptiveTimesteps,
    ConsistencyProbe,
    CurriculumWeight,
    FIDEvaluation,
    FiniteUpdates,
    GradientDiagnostics,
    ImportanceWeightedCurriculum,
    InfoNoise,
    LossDensity,
    LossSecondMomentResampler,
    LRCompensation,
    MomentumDecay,
    NoiseLevelLoss,
    PowerEMA,
    RankWatch,
    SampleGrid,
    StepSeed,
    TimestepCurriculum,
)
from lit_diffusion.cli.exact_resume import ExactResume
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_rows
from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.digits import Digits
from lit_diffusion.lr_schedules import WarmupCosine
from lit_diffusion.networks.unet import UNet
from support.plain_module import assert_same_bits, make_trainer
from support.tiny_diffusion import tiny_diffusion

few_digits = partial(Digits, part=(0, 5))
STEPS = 12  # of which an epoch has 5 batches of 56
CALLBACKS = {
    "RankWatch": lambda: RankWatch(timeout=60),
    "StepSeed": lambda: StepSeed(5),
    "FiniteUpdates": lambda: FiniteUpdates(2),
    "EMA": lambda: EMA((0.9, 0.5), every_n_steps=2),
    "MomentumDecay": lambda: MomentumDecay(STEPS, min_beta1=0.4),
    "TimestepCurriculum": lambda: TimestepCurriculum(8, mean=0.3, std=0.2),
    "NoiseLevelLoss": lambda: NoiseLevelLoss(4, num_images=20),
    "SampleGrid": lambda: SampleGrid(4, every_n_steps=3),
    "GradientDiagnostics": lambda: GradientDiagnostics(every_n_steps=3, num_levels=2, num_images=8),
    "ConsistencyProbe": lambda: ConsistencyProbe(4, every_n_steps=3),
    "FIDEvaluation": lambda: FIDEvaluation(
        66, "digits-cnn", every_n_steps=4, weights="raw", cache_dir="cache"
    ),
}
ALTERNATIVES = {  # each to another one above, beside which it is refused
    "PowerEMA": lambda: PowerEMA((0.1, 0.2)),
    "LRCompensation": lambda: LRCompensation(min_beta1=0.4),
    "CurriculumWeight": lambda: CurriculumWeight(8, mean=0.3, std=0.2),
    "ImportanceWeightedCurriculum": lambda: ImportanceWeightedCurriculum(8, mean=0.3, std=0.2),
    "LossSecondMomentResampler": lambda: LossSecondMomentResampler(num_bins=4, history=3),
    "LossDensity": lambda: LossDensity(num_bins=4, history=3),
    "InfoNoise": lambda: InfoNoise(num_bins=4, history=3),
    "AdaptiveTimesteps": lambda: AdaptiveTimesteps(num_bins=4, every_n_steps=2, lr=0.1),
}
FOREIGN = {
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
}


def _plateau(optimizer, interval, frequency=1, monitor="val/loss"):
    """Halves the lr at every update, as nothing is better by ten."""
    never = {"threshold": 10.0, "threshold_mode": "abs"}
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **never)
    when = {"interval": interval, "frequency": frequency}
    return {"scheduler": scheduler, "monitor": monitor, "strict": False, **when}


SCHEDULES = {  # in place of the module's, which has one per step
    "plateau of epochs": lambda optimizer: _plateau(optimizer, "epoch"),
    "plateau of two epochs": lambda optimizer: _plateau(optimizer, "epoch", 2),
    "plateau of steps": lambda optimizer: _plateau(optimizer, "step"),
    "plateau of training": lambda optimizer: _plateau(optimizer, "step", 2, "train/loss"),
    "steps of epochs": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5)},
}


class Death(Exception):
    """What a run dies of."""


class DieAfter(Checkpoint):
    """Saves as soon as LastCheckpoint would after batch `batch`, and dies in the step after that.

    Args:
        folder: for the file.
        batch: the first that may be saved.
        at_once: whether it dies as soon as the file is there.
    """

    def __init__(self, folder, batch, at_once=False):
        self.batch = batch
        self.at_once = at_once
        self.saved = math.inf
        self.keep = LastCheckpoint(folder, first=1, every_n_seconds=0.0)

    def on_train_start(self, trainer, pl_module):
        self.keep.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step > self.saved:
            raise Death
        self.keep.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._try(self.keep.on_train_batch_end, trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer, pl_module):
        self._try(self.keep.on_validation_end, trainer, pl_module)

    def _try(self, hook, trainer, *arguments):
        batches = trainer.fit_loop.total_batch_idx + 1
        if batches < self.batch or self.saved < math.inf:  # which all ranks know alike
            return
        hook(trainer, *arguments)
        if self.keep.path.exists():
            self.saved = trainer.global_step
            if self.at_once:
                raise Death


TRAINER_SETTINGS = (
    (("gradient_clip_val", 0.1), ("precision", "bf16-mixed")),
    (("accumulate_grad_batches", 2),),
)
"""Settings of the Trainer under which each kind of optimizer and network must resume."""


@dataclass(frozen=True)
class Recipe:
    """One kind of run."""

    callbacks: tuple[str, ...] = ("EMA",)
    workers: tuple[int, int] = (0, 0)  # before and after the death
    trainer: tuple[tuple[str, object], ...] = ()
    batch_size: int = 56
    schedule: str | None = None
    accumulates_itself: bool = False
    data: Callable[..., ImageDataModule] = few_digits
    module: Callable[[], LightningModule] | None = None  # None is a small diffusion model

    def fit(self, folder, *extra, ckpt_path=None, resumed=False):
        seed_everything(3)
        module = small_unet() if self.module is None else self.module()
        if self.accumulates_itself:
            accumulate_in_pairs(module)
        if self.schedule is not None:
            module.configure_optimizers = lambda: self._scheduled(module)
        trainer = make_trainer(
            folder,
            *extra,
            *((CALLBACKS | ALTERNATIVES | FOREIGN)[name]() for name in self.callbacks),
            ExactResume(),
            logger=AppendingCSVLogger(folder),
            **{
                "max_steps": STEPS,
                "max_epochs": -1,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": bool(extra),
                **dict(self.trainer),
            },
        )
        data = self.data(batch_size=self.batch_size, num_workers=self.workers[resumed], seed=1)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / "end.ckpt")
        return torch.load(folder / "end.ckpt", weights_only=True)

    def _scheduled(self, module):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.schedule](optimizer)}


def small_unet():
    """A diffusion model of digits, with dropout."""
    network = UNet(1, 1, 4, (1, 2), num_res_blocks=1, norm_groups=2, num_classes=10, dropout=0.1)
    return tiny_diffusion(
        num_classes=10,
        network=network,
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=3),
    )


def accumulate_in_pairs(module):
    """Give a module manual optimization, with a step in each second batch of an epoch."""
    module.automatic_optimization = False
    training_step = module.training_step

    def accumulate(batch, batch_idx):
        out = training_step(batch, batch_idx)
        module.manual_backward(out["loss"])
        if batch_idx % 2 or batch_idx == 4:  # the last
            module.optimizers().step()
            module.optimizers().zero_grad()
        return {name: value.detach() for name, value in out.items()}

    module.training_step = accumulate


def curves(folder):
    rows = read_rows(folder / "metrics.csv")
    file = folder / "evaluations.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    scores = [json.loads(line) for line in lines]
    return rows, [{k: v for k, v in score.items() if k != "seconds"} for score in scores]


def assert_undisturbed(tmp_path, recipe, batch, at_once=False):
    died = tmp_path / "died"
    assert_goes_on(tmp_path, recipe, DieAfter(died, batch, at_once), error=Death)


_undisturbed = {}  # recipe -> what a run of it saved at its end, its rows and scores


def assert_goes_on(tmp_path, recipe, *dying, error):
    """A run that dies of what `dying` raises and is resumed ends as one that did not."""
    if recipe not in _undisturbed:
        _undisturbed[recipe] = recipe.fit(tmp_path / "whole"), curves(tmp_path / "whole")
    whole, rows_and_scores = _undisturbed[recipe]
    died = tmp_path / "died"
    with pytest.raises(error) as raised:
        recipe.fit(died, *dying)
    again = recipe.fit(died, ckpt_path=died / "last.ckpt", resumed=True)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops"):
        assert_same_bits(again[key], whole[key])
    assert (again["global_step"], again["epoch"]) == (whole["global_step"], whole["epoch"])
    assert curves(died) == rows_and_scores
    return raised.value


def resume_on_two_ranks(folder, batch, workers, data=None):
    """As `assert_undisturbed`, with two ranks, whose epoch has five batches as that of one."""
    trainer = (("devices", 2), ("strategy", "ddp"), ("accumulate_grad_batches", 2))
    options = {"trainer": trainer, "batch_size": 28, **({"data": data} if data else {})}
    callbacks = ("EMA", "MomentumDecay", "NoiseLevelLoss")
    assert_undisturbed(folder, Recipe(callbacks, (workers, workers), **options), batch)
