"""How long a run would take: a few samples and steps on this machine, extrapolated to the whole."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer

from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.callbacks.sample_grid import SampleGrid
from lit_diffusion.cli.doctor.fid import Extractor
from lit_diffusion.cli.doctor.measuring import Stopwatch, sampling_seconds, seconds_of
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.rehearsal import Rehearsal
from lit_diffusion.cli.doctor.report import (
    Finding,
    count,
    duration,
    note,
    ok,
    problem,
    share,
    warning,
)
from lit_diffusion.conditioning import condition_for
from lit_diffusion.metrics.extractors import match_channels
from lit_diffusion.modules.diffusion import DiffusionModule

MUCH = 0.5
"""Share of a run from which the time of measuring is told."""

KEPT: tuple[str, ...] = ("accelerator", "precision", "accumulate_grad_batches", "log_every_n_steps")
KEPT += ("gradient_clip_val", "gradient_clip_algorithm")
"""Settings of the Trainer that a step's time depends on, or whether it works."""


@dataclass(frozen=True)
class Looks:
    """What looks at samples during a run."""

    evaluations: Mapping[FIDEvaluation, Extractor]
    grids: Sequence[SampleGrid]


@dataclass
class Timing:
    """Seconds on one process of this machine; None where not known."""

    device: str
    step: float | None = None  # of an optimizer step
    image: float | None = None  # of a sample
    feature: float | None = None  # of a sample's features
    step_how: str = ""  # what was measured for a step
    image_how: str = ""  # what was measured for a sample


def check_timing(plan: Plan, looks: Looks, timing: Timing) -> list[Finding]:
    """What the run takes, and which share of it goes into looking at its samples."""
    if timing.step is None or plan.steps_to_go is None:
        return []
    fids, grids = fid_seconds(plan, looks, timing), grid_seconds(plan, looks, timing)
    validation = validation_seconds(plan, timing)
    total = timing.step * plan.steps_to_go + validation + fids + grids
    told = f"about {duration(total)} on {timing.device} (estimate: {duration(timing.step)} a step, "
    told += f"{timing.step_how})"
    found = [note("time", told)]
    if validation > MUCH * total:
        text = f"about {share(validation / total)} of the time goes into validation; raise "
        found.append(warning("validation time", f"{text}val_check_interval."))
    if not fids + grids:
        return found
    part, rounds = (fids + grids) / total, sum(rounds_of(e, plan) for e in looks.evaluations)
    each = f"{duration(fids / rounds)} each" if rounds else "no time"
    without = "" if timing.feature or not rounds else "; without their features"
    told = f"about {share(part)} of the time: {count(rounds, 'FID')} of {each} and "
    told += f"{duration(grids)} for grids ({timing.image_how}{without})"
    if part <= MUCH:
        return [*found, ok("evaluation time", told)]
    fix = "evaluate more rarely (every_n_steps), on fewer samples, or with fewer solver steps."
    return [*found, warning("evaluation time", f"{told}; {fix}")]


def rounds_of(evaluation: FIDEvaluation, plan: Plan) -> int:
    """FIDs that are measured, repeats included."""
    return (plan.times(evaluation.every_n_steps) or 0) + evaluation.repeats_at_end


def fid_seconds(plan: Plan, looks: Looks, timing: Timing) -> float:
    """Of all FIDs; the ranks share the samples."""
    each = (timing.image or 0.0) + (timing.feature or 0.0)
    return each * sum(
        rounds_of(e, plan) * math.ceil(e.num_samples / plan.ranks) for e in looks.evaluations
    )


def grid_seconds(plan: Plan, looks: Looks, timing: Timing) -> float:
    """Of all grids of samples; each rank generates all of one."""
    drawn = sum(grid.num * (plan.times(grid.every_n_steps) or 0) for grid in looks.grids)
    return (timing.image or 0.0) * drawn


def validation_seconds(plan: Plan, timing: Timing) -> float:
    """Of all validations: an image takes a third of what training on it takes."""
    if not plan.val_images or timing.step is None or not plan.batch_size:
        return 0.0
    each = timing.step / (plan.batch_size * plan.accumulate) / 3
    return each * math.ceil(plan.val_images / plan.ranks) * (plan.times(None) or 0)


# Measuring


def examine_time(cli: Rehearsal, plan: Plan, looks: Looks, seconds: float) -> Iterator[Finding]:
    """Measure, for some seconds each, samples, forward passes and steps, and extrapolate."""
    module, trainer = cli.model, cli.trainer
    if plan.batch_size is None:
        yield note("time", "not estimated: the size of a batch is not known.")
        return
    device = trainer.strategy.root_device
    trainer.precision_plugin.convert_module(module).to(device)
    timing = Timing(f"the CPU here ({count(torch.get_num_threads(), 'thread')})")
    if device.type == "cuda":
        timing = Timing(f"one {torch.cuda.get_device_name(device)}")
    try:
        if isinstance(module, DiffusionModule):
            with trainer.precision_plugin.forward_context(), torch.no_grad():
                _time_parts(module, timing, plan, looks, seconds)
        # Of another module nothing is known, and steps may take what they do.
        if plan.batches_per_epoch and (timing.step or 0.0) < seconds:
            _time_training(cli, timing, seconds)
    except Exception as error:  # whatever a fit would end with too
        yield problem("training", f"the first steps fail: {error}")
        return
    yield from check_timing(plan, looks, timing)


def _time_parts(
    module: DiffusionModule, timing: Timing, plan: Plan, looks: Looks, seconds: float
) -> None:
    assert plan.batch_size is not None
    sizes = [e.batch_size for e in looks.evaluations] + [g.batch_size for g in looks.grids]
    if sizes:
        timing.image, timing.image_how = sampling_seconds(module, max(sizes), seconds)
    features = [_time_features(e, x, module) for e, x in looks.evaluations.items() if x.network]
    timing.feature = max(features, default=None)
    forward, num = seconds_of(lambda num: _forward(module, num), plan.batch_size, seconds)
    timing.step = 3 * forward * plan.accumulate  # a backward pass takes about twice a forward one
    timing.step_how = f"extrapolated from a forward pass of {count(num, 'image')}"


def _time_features(
    evaluation: FIDEvaluation, extractor: Extractor, module: DiffusionModule, num: int = 4
) -> float:
    assert extractor.network is not None
    network, channels = extractor.network.to(module.device), evaluation.protocol.channels
    images = torch.zeros(num, *module.image_shape, dtype=torch.uint8, device=module.device)
    return seconds_of(lambda n: network(match_channels(images[:n], channels)), num, 1.0)[0] / num


def _forward(module: DiffusionModule, num: int) -> object:
    x0 = torch.zeros(num, *module.image_shape, device=module.device)
    t = torch.full((num,), module.process.t_max, dtype=torch.float64, device=module.device)
    labels = condition_for(range(num), None, module.conditioning)
    labels = move_data_to_device(labels, module.device)
    return module.per_sample_loss(x0, labels, t, torch.randn_like(x0), 0)


def _time_training(cli: Rehearsal, timing: Timing, seconds: float) -> None:
    watch = Stopwatch(seconds)
    callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
    ours = [each for each in callbacks if isinstance(each, FiniteUpdates)]
    guards = [FiniteUpdates(each.max_nonfinite_steps) for each in ours]
    asked = cli.config_dump["trainer"]
    settings = {name: asked[name] for name in KEPT[0 if cli.refusal is None else 2 :]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **settings,
            devices=1,
            max_steps=30,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[watch, *guards],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],  # whatever launcher the run itself has
            default_root_dir=folder,
        )
        trainer.fit(cli.model, cli.datamodule)
    if watch.steps:
        timing.step, timing.step_how = watch.seconds, f"measured on {count(watch.steps, 'step')}"
