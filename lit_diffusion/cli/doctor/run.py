"""Build and start a fit on one process, which `lit-diffusion doctor` examines."""

import math
import time
from collections.abc import Callable, Sized
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_diffusion import callbacks
from lit_diffusion.callbacks.evaluation import PeriodicEvaluation
from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.sample_grid import SampleGrid
from lit_diffusion.callbacks.trainer_state import limited_batches
from lit_diffusion.cli.fitting import RunCLI, explain
from lit_diffusion.cli.run_folder import Request
from lit_diffusion.config.messages import describe_error, explain_parse_error, is_user_error
from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.loaders import ShuffledSampler
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.protocols import Denoise, NonFiniteSamples, Process
from lit_diffusion.solvers.steps import solver_times

CONNECTING = {"RankWatch", "SaveOnSignal"}  # open connections or set signal handlers
OUR_CALLBACKS = tuple(getattr(callbacks, name) for name in {*callbacks.__all__} - CONNECTING)
"""Callbacks that the doctor runs; they write nothing before the first step."""


class FitOnOneProcess(RunCLI):
    """Builds everything that `fit` builds, but with a one-process Trainer that writes to `folder`.

    The class also builds the Trainer of the config. If this Trainer cannot be built, `failures`
    says why, and the one-process Trainer runs on the CPU.
    """

    def __init__(self, request: Request, contexts: ExitStack, folder: str) -> None:
        self.folder = folder
        self.failures: list[tuple[str, str]] = []  # (topic, error message)
        self.call_fit: Callable[[], None]  # starts `fit`
        super().__init__(request, contexts)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build both Trainers, and return the one-process Trainer."""
        settings = self.config_init["fit"]["trainer"]
        try:
            trainer = super().instantiate_trainer(**kwargs)
            self.num_devices, self.num_nodes = trainer.num_devices, trainer.num_nodes
        except Exception as error:  # Lightning raises many types
            self.failures.append(("trainer", explain_parse_error(error)))
            devices = settings.devices
            number = str(len(devices) if isinstance(devices, list) else devices)
            self.num_devices = int(number) if number.isdigit() else 1
            self.num_nodes = settings.num_nodes
            settings.accelerator, settings.precision = "cpu", "32-true"
        settings.devices = settings.num_nodes = 1
        settings.strategy, settings.plugins = "auto", [LightningEnvironment()]
        settings.logger, settings.profiler, settings.num_sanity_val_steps = False, None, 0
        settings.default_root_dir = self.folder
        return super().instantiate_trainer(**kwargs)

    def run_trainer(self, run: Callable[[], None]) -> None:
        """Do not start the Trainer; `call_fit` does so later."""
        self.call_fit = run

    def before_fit(self) -> None:
        """Write nothing into the run folder."""

    def after_fit(self) -> None:
        """Print no summary."""


class ExaminedRun:
    """The objects of a run, its length and its measured times. None means unknown.

    Each measurement of speed takes at most `seconds` seconds.
    """

    def __init__(self, cli: FitOnOneProcess, seconds: float) -> None:
        self.cli, self.request = cli, cli.request
        self.trainer: Trainer = cli.trainer
        self.module, self.data = cli.model, cli.datamodule
        self.callbacks: list[Callback] = list(self.trainer.callbacks)  # type: ignore[attr-defined]
        self.has_timer = any(isinstance(callback, Timer) for callback in self.callbacks)
        if self.trainer.max_epochs is None:  # as Lightning resolves it at the start of a fit
            has_end = self.trainer.max_steps != -1 or self.has_timer
            self.trainer.fit_loop.max_epochs = -1 if has_end else 1000
        self.evaluations = [c for c in self.callbacks if isinstance(c, FIDEvaluation)]
        self.grids = [c for c in self.callbacks if isinstance(c, SampleGrid)]
        self.ranks: int = cli.num_devices * cli.num_nodes
        self.start_step: int = cli.saved_step or 0  # step from which the run resumes
        self.failures = cli.failures
        self.batch_size: int | None = getattr(self.data, "batch_size", None)  # of each process
        self.sample_seconds = 0.0  # per generated image on one process; 0 if unknown
        self.step_seconds = math.nan  # per optimizer step
        self.step_source = ""  # what `step_seconds` was measured on
        if isinstance(self.module, DiffusionModule):
            self._time_samples(self.module, seconds)
        self.missing_data: str | None = None  # what `fit` would download
        if isinstance(self.data, ImageDataModule):
            self.missing_data = self.data.pending_setup()
        elif self.data is not None and is_overridden("prepare_data", self.data):
            self.missing_data = f"{type(self.data).__name__}.prepare_data may need a network"
        ours = [callback for callback in self.callbacks if isinstance(callback, OUR_CALLBACKS)]
        for fid in self.evaluations:
            try:
                fid.protocol.check()
            except (OSError, ValueError) as error:
                self.failures.append(("FID weights", f"{fid.protocol.name}: {error}"))
                ours.remove(fid)
        if self.missing_data is None:
            self._start(ours, seconds)
        self._count_steps()

    def count_rounds(self, every_n_steps: float | None) -> int:
        """Number of times that an interval ends in the rest of the run; 0 if unknown."""
        if not every_n_steps or self.num_steps is None:
            return 0
        # The interval may be a fraction of an epoch, whose rounding must not change the number.
        ends = (self.start_step / every_n_steps, self.num_steps / every_n_steps)
        return max(math.floor(ends[1] + 1e-9) - math.floor(ends[0] + 1e-9), 0)

    def _time_samples(self, module: DiffusionModule, seconds: float) -> None:
        """Time one network call of sampling, and extrapolate to samples and training steps."""
        trainer, solver = self.trainer, module.solver
        times = solver_times(solver, module.process)

        def denoise_once(denoise: Denoise, process: Process, noise: Tensor, *_: object) -> Tensor:
            return denoise(noise, times[:1].to(noise.device).expand(len(noise))).x0

        def seconds_per_image(num: int) -> float:
            for _ in range(2):  # the first allocates memory
                start = synchronized_time()
                with suppress(NonFiniteSamples):  # weights are untrained
                    module.generate(range(num))
            return (synchronized_time() - start) / num

        sampled = [e.batch_size for e in self.evaluations] + [g.batch_size for g in self.grids]
        num = max(sampled, default=self.batch_size or 1)
        module.solver = SimpleNamespace(sample=denoise_once)
        try:
            trainer.precision_plugin.convert_module(module).to(trainer.strategy.root_device)
            with trainer.precision_plugin.forward_context(), torch.no_grad():
                call_seconds = seconds_per_image(1)
                num = min(num, int(seconds / call_seconds / 2))  # within the time
                call_seconds = seconds_per_image(num) if num > 1 else call_seconds
        except Exception as error:  # a run would fail as well, for example out of memory
            self.failures.append(("sampling", describe_failure(error)))
            return
        finally:
            module.solver = solver
        self.sample_seconds = call_seconds * len(times)
        # A backward pass takes as long as two forward passes.
        images = (self.batch_size or 1) * trainer.accumulate_grad_batches
        self.step_seconds = 3 * call_seconds * images
        self.step_source = f"extrapolated from a forward pass of {max(num, 1)} images"

    def _start(self, callbacks: list[Callback], seconds: float) -> None:
        """Call `fit`, which sets everything up and restores a checkpoint, and time its first steps.

        No step is made if a step is expected to take longer than `seconds`.
        """
        watch = Stopwatch(seconds, makes_steps=not self.step_seconds > seconds)
        self.trainer.callbacks = [*callbacks, watch]  # type: ignore[attr-defined]
        try:
            self.cli.call_fit()
        except FitMeasured:
            pass
        except Exception as error:  # the run would fail with it
            untrained = self.trainer.global_step == self.start_step
            explanation = explain(error, self.request, untrained)
            self.failures.append(("fit", str(explanation or describe_failure(error))))
        times = watch.times[2:] if len(watch.times) > 3 else watch.times[1:]
        if len(times) > 1:
            (first, start), *_, (last, end) = times
            self.step_seconds = (end - start) / (last - first)
            self.step_source = f"measured on {last - first} steps"

    def _count_steps(self) -> None:
        """Compute the run's length. The run may have more processes than this Trainer."""
        trainer, loader = self.trainer, self.trainer.train_dataloader
        accumulate = trainer.accumulate_grad_batches
        dataset = getattr(loader, "dataset", None)
        self.num_images = len(dataset) if isinstance(dataset, Sized) else None  # None for streams
        self.num_val_batches = sum(n for n in trainer.num_val_batches if math.isfinite(n))
        self.batch_size = getattr(loader, "batch_size", None) or self.batch_size
        batches = trainer.num_training_batches
        if self.ranks > 1 and isinstance(loader, DataLoader) and math.isfinite(batches):
            batches = limited_batches(trainer, batches_per_rank(loader, self.ranks))
        batches = 0 if loader is None or math.isinf(batches) else int(batches)  # 0 is unknown
        self.steps_per_epoch = math.ceil(batches / accumulate) or None

        limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if self.steps_per_epoch and trainer.max_epochs is not None and trainer.max_epochs >= 0:
            limits.append(trainer.max_epochs * self.steps_per_epoch)
        self.num_steps = min(limits, default=None)

        interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
        between: float | None = None  # batches from one validation to the next, on average
        if trainer.limit_val_batches == 0 or not is_overridden("validation_step", self.module):
            between = 0
        elif epochs is None and isinstance(interval, int):
            between = interval
        elif epochs is not None and batches and isinstance(interval, int | float):
            each = interval if isinstance(interval, int) else max(int(batches * interval), 1)
            between = batches * epochs / (batches // each) if each <= batches else None
        steps_per_batch = (self.steps_per_epoch or 0) / batches if batches else 1 / accumulate
        self.validation_interval = None if between is None else between * steps_per_batch


def batches_per_rank(loader: DataLoader[Any], ranks: int) -> int:
    """Number of batches of each rank in an epoch, if a loader of one process is divided."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return len(loader) // ranks
    # ShuffledSampler drops images that not every rank can have. The Trainer's sampler repeats some.
    drops, images = isinstance(loader.sampler, ShuffledSampler), len(cast(Sized, loader.sampler))
    share = images // ranks if drops else math.ceil(images / ranks)
    return share // loader.batch_size if loader.drop_last else math.ceil(share / loader.batch_size)


class FitMeasured(Exception):
    """Raised when the first steps of a fit have been timed."""


class Stopwatch(Callback):
    """Times the first optimizer steps of a fit, and ends it by raising `FitMeasured`.

    The fit ends after 30 steps, or when `seconds` seconds have passed since the end of the first
    step. The time limit excludes the first step, because this step may compile the network. The fit
    also ends when a validation starts. If `makes_steps` is False, it ends before the first step.
    """

    def __init__(self, seconds: float, makes_steps: bool) -> None:
        self.seconds, self.makes_steps = seconds, makes_steps
        self.times: list[tuple[int, float]] = []  # (optimizer steps, time), from the start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove callbacks that generate samples, after their `on_fit_start` was called."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        steady = [each for each in callbacks if not isinstance(each, PeriodicEvaluation)]
        trainer.callbacks = steady  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if not self.makes_steps:
            raise FitMeasured
        self.times.append((trainer.global_step, synchronized_time()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the time of a step, and end the fit after enough steps."""
        step, now = trainer.global_step, synchronized_time()
        if step > self.times[-1][0]:
            self.times.append((step, now))
        begin = self.times[:2][-1][1]  # the end of the first step
        if len(self.times) > 30 or now - begin > self.seconds:
            raise FitMeasured

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the fit."""
        raise FitMeasured


def synchronized_time() -> float:
    """Monotonic time in seconds, after all queued work of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def describe_failure(error: BaseException) -> str:
    """The message of an error, with the type of the error unless a check raised it."""
    text = describe_error(error)
    return text if is_user_error(error) else f"{type(error).__name__}: {text}"
