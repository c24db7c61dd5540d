"""A few samples and steps of a run, for the time that the whole would take."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer

from lit_diffusion.doctor.extractors import Extractor
from lit_diffusion.doctor.plan import Plan
from lit_diffusion.doctor.rehearsal import Data, Rehearsal
from lit_diffusion.doctor.report import Finding, count, note, problem
from lit_diffusion.doctor.timing import (
    Stopwatch,
    Timing,
    check_timing,
    forward_context,
    forward_seconds,
    sampling_seconds,
    solver_times,
    timed,
)
from lit_diffusion.metrics.protocols import match_channels
from lit_diffusion.modules.diffusion import DiffusionModule


def examine_time(
    cli: Rehearsal, data: Data, plan: Plan, extractors: Sequence[Extractor], seconds: float
) -> Iterator[Finding]:
    """Measure and extrapolate."""
    module, trainer = cli.model, cli.trainer
    if trainer is None or plan.batch_size is None:
        yield note("time", "not estimated: without a Trainer, or batches of a known size.")
        return
    device = trainer.strategy.root_device
    trainer.precision_plugin.convert_module(module).to(device)
    timing = Timing(_device_name(device), device.type == "cpu")
    try:
        if isinstance(module, DiffusionModule):
            timing = _time_parts(module, cli, timing, plan, extractors, seconds)
        # Of another module nothing is known, and steps may take what they do.
        if data.is_open and (timing.step or 0.0) < seconds:
            timing = _time_training(cli, timing, seconds)
    except Exception as error:  # whatever a fit would end with too
        yield problem("training", f"the first steps fail: {error}")
        return
    yield from check_timing(plan, timing)


def _time_parts(
    module: DiffusionModule,
    cli: Rehearsal,
    timing: Timing,
    plan: Plan,
    extractors: Sequence[Extractor],
    seconds: float,
) -> Timing:
    """Samples, their features and forward passes."""
    assert plan.batch_size is not None
    with forward_context(cli.trainer), torch.no_grad():
        if plan.evaluations or plan.grids:
            image, how = _time_sampling(module, cli, seconds)
            timing = replace(timing, image=image, image_how=how)
        forward, how = forward_seconds(partial(_forward, module), plan.batch_size, seconds)
    features = [_time_features(each, module) for each in extractors if each.network is not None]
    step = 3 * forward * plan.accumulate  # a backward pass takes about twice a forward one
    how = f"extrapolated {how}"
    return replace(timing, feature=max(features, default=None), step=step, step_how=how)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"the CPU here ({count(torch.get_num_threads(), 'thread')})"


def _time_sampling(module: DiffusionModule, cli: Rehearsal, seconds: float) -> tuple[float, str]:
    sizes = [a["batch_size"] for _, a in cli.given_callbacks() if "batch_size" in a]
    calls = len(solver_times(module.solver, module.process))

    def generate(num: int) -> object:
        return module.generate(range(num))

    return sampling_seconds(generate, module.network, calls, max(sizes, default=64), seconds)


def _time_features(extractor: Extractor, module: DiffusionModule, num: int = 4) -> float:
    assert extractor.network is not None
    network, channels = extractor.network.to(module.device), extractor.protocol.channels
    images = torch.zeros(num, *module.image_shape, dtype=torch.uint8, device=module.device)
    with torch.no_grad():
        return timed(lambda: network(match_channels(images, channels))) / num


def _forward(module: DiffusionModule, num: int) -> object:
    x0 = torch.zeros(num, *module.image_shape, device=module.device)
    t = torch.full((num,), module.process.t_max, dtype=torch.float64, device=module.device)
    labels = None
    if module.num_classes is not None:
        labels = torch.zeros(num, dtype=torch.int64, device=module.device)
    return module.per_sample_loss(x0, labels, t, torch.randn_like(x0), 0)


def _time_training(cli: Rehearsal, timing: Timing, seconds: float) -> Timing:
    """Real steps on real batches, into no run folder."""
    watch = Stopwatch(seconds)
    _train(cli, watch)
    if not watch.steps:
        return timing
    return replace(timing, step=watch.seconds, step_how=f"measured on {count(watch.steps, 'step')}")


def _train(cli: Rehearsal, watch: Callback, max_steps: int = 30) -> None:
    settings = cli.settings
    kept = ("accelerator", "precision", "accumulate_grad_batches", "gradient_clip_val")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **{name: settings[name] for name in kept},
            gradient_clip_algorithm=settings["gradient_clip_algorithm"],
            log_every_n_steps=settings["log_every_n_steps"],
            devices=1,
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch],
            plugins=[LightningEnvironment()],  # whatever launcher the run itself has
            default_root_dir=folder,
        )
        trainer.fit(cli.model, cli.datamodule)
