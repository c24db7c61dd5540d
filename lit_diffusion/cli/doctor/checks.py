"""Checks of an `ExaminedRun`; each check yields findings."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.cli.doctor.run import ExaminedRun, FitOnOneProcess, describe_failure
from lit_diffusion.cli.exact_resume import save_interval
from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.config.trust import allow_class_paths
from lit_diffusion.data.loaders import usable_cores
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.solvers.steps import solver_times


class Level(IntEnum):
    """How serious a finding is."""

    OK = 0
    NOTE = 1  # worth knowing; nothing has to change
    WARNING = 2  # the run will end, but probably not as intended
    PROBLEM = 3  # the run will fail, never end, or not do what the config says


@dataclass(frozen=True)
class Finding:
    """One line of the report: level, topic, and a text with rule, value and fix."""

    level: Level
    topic: str
    text: str


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def check_ranks(run: ExaminedRun) -> Iterator[Finding]:
    """Check that each CPU process has a core, and that SLURM starts all processes of the run.

    A launch by torchrun is not checked, because Lightning reports most mistakes in it.
    """
    devices, nodes = run.cli.num_devices, run.cli.num_nodes
    if run.trainer.strategy.root_device.type == "cpu" and devices > (cores := usable_cores()):
        yield warning("ranks", f"{devices} processes on {cores} core(s); lower --trainer.devices.")
    tasks = os.environ.get("SLURM_NTASKS", "")
    is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning decides
    if "SLURM_JOB_ID" not in os.environ:
        return
    if is_shell and tasks not in ("", "1"):
        text = f"each of the {tasks} tasks would train a run of its own, because Lightning ignores "
        text += "SLURM in jobs named bash or interactive; change --job-name."
        yield problem("ranks", text)
    elif is_shell or not tasks.isdigit():
        text = "Lightning ignores SLURM here and uses one node: the job is named bash or "
        text += "interactive, or has no --ntasks-per-node."
        yield problem("ranks", text) if nodes > 1 else note("ranks", text)
    elif int(tasks) != run.ranks:
        text = f"SLURM starts {tasks} task(s), but the run waits for {run.ranks}; submit with "
        yield problem("ranks", f"{text}--ntasks-per-node={devices} --nodes={nodes}.")
    else:
        yield ok("ranks", f"{tasks} task(s) of SLURM")


def check_threads(run: ExaminedRun) -> Iterator[Finding]:
    """Check that no other processes use the cores on which the threads of torch run."""
    is_cpu, threads = run.trainer.strategy.root_device.type == "cpu", torch.get_num_threads()
    (load, *_), cores = os.getloadavg(), usable_cores()
    if is_cpu and threads > 1 and load + threads > cores + 1:
        text = f"the load average is {load:.1f} on {cores} cores, so other processes are running. "
        text += f"The {threads} threads of torch wait for each other, so a step can take 20 times "
        yield note("threads", f"{text}as long; set OMP_NUM_THREADS=1, or stop the others.")


def check_length(run: ExaminedRun) -> Iterator[Finding]:
    """Check that the run ends, and report after how many steps."""
    steps, trainer = run.num_steps, run.trainer
    if trainer.max_steps == trainer.max_epochs == -1 and not run.has_timer:
        text = "never stops: max_steps and max_epochs are both -1; set --trainer.max_steps=N."
        yield warning("length", text)
    elif steps is None:
        yield note("length", "unknown: a time limit ends the run, or epochs have no known length.")
    elif steps <= run.start_step:
        text = f"no step is left: {run.start_step:,} of {steps:,} are done (see max_steps, "
        yield problem("length", f"{text}max_epochs and limit_train_batches); raise the limit.")
    else:
        images = (run.batch_size or 0) * run.ranks * trainer.accumulate_grad_batches
        text = f"{steps:,} optimizer steps" + (f" of {images:,} images" if images else "")
        text += f", of which {run.start_step:,} are done" if run.start_step else ""
        if run.steps_per_epoch and run.num_images:
            text += f", {steps / run.steps_per_epoch:,.1f} epochs of {run.num_images:,}"
        yield ok("length", text)


def check_intervals(run: ExaminedRun) -> Iterator[Finding]:
    """Check that validations, evaluations and saves happen within the run."""
    steps, validation = run.num_steps, run.validation_interval
    if steps is None or steps <= run.start_step:
        return
    too_long = f"is more than the {steps - run.start_step:,} remaining steps allow; lower it."
    if validation and not (rounds := run.count_rounds(validation)):
        text = f"val_check_interval of {validation:,.0f} steps {too_long}"
        yield warning("validation", text)
    elif validation:
        yield ok("validation", f"{rounds} times, every {validation:,.0f} steps")
    for callback in run.callbacks:
        every = getattr(callback, "every_n_steps", None)
        every = getattr(callback, "snapshot_every_n_steps", None) or every
        if isinstance(callback, ModelCheckpoint):
            every = save_interval(callback)
        if every and not run.count_rounds(every):
            yield warning(type(callback).__name__, f"its interval of {every:,} steps {too_long}")


def check_lr(run: ExaminedRun) -> Iterator[Finding]:
    """Check that the warm-up of the lr is short compared with the run."""
    for config in run.trainer.lr_scheduler_configs:
        scheduler, steps = config.scheduler, run.num_steps
        if config.interval != "step" or not steps:
            continue
        name, warmup = type(scheduler).__name__, getattr(scheduler, "warmup_steps", 0)
        text = f"{name} warms up for {warmup:,} steps, {warmup / steps:.1%} of the run"
        if warmup >= steps:
            yield problem("lr", f"{text}; shorten the warm-up.")
        elif warmup > 0.2 * steps:
            yield warning("lr", f"{text}; 1 to 10% is usual.")
        else:
            yield ok("lr", text)


def check_ema(run: ExaminedRun) -> Iterator[Finding]:
    """Check that EMA weights do not lag too far behind the trained weights."""
    emas = [c for c in run.callbacks if isinstance(c, EMA) and not isinstance(c, PowerEMA)]
    steps = run.num_steps or 0
    for decay, warmup in [(d, ema.warmup) for ema in emas for d in ema.decays if steps]:
        reached = min(decay, (1 + steps) / (10 + steps)) if warmup else decay
        half_life = math.log(0.5) / math.log(reached) if reached else 0.0
        text = f"the half-life of {decay:g} is {half_life:,.0f} steps, {half_life / steps:.1%} of "
        if half_life > 0.1 * steps:
            text += "the run: samples lag that far behind; set warmup: true or a decay of at most "
            yield warning("EMA", f"{text}{0.5 ** (20 / steps):.4g}.")  # 5% of the run
        else:
            yield ok("EMA", f"{text}the run")


def check_terminal_snr(run: ExaminedRun) -> Iterator[Finding]:
    """Check that x_t is almost pure noise at the noisiest time and at the solver's first time.

    Source: Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed".
    """
    if not isinstance(module := run.module, DiffusionModule):
        return
    start = float(solver_times(module.solver, module.process)[0])
    times = torch.tensor([module.process.t_max, start], dtype=torch.float64)
    alpha, sigma = module.process.alpha_sigma(times)
    at_end, at_start = (alpha / sigma).tolist()
    text = f"alpha {alpha[0]:.2g} and sigma {sigma[0]:.3g} at the noisiest time"
    if at_end > 0.05:
        text += f": {at_end:.0%} of the image remain, but samples start from pure noise; use a "
        yield warning("terminal SNR", f"{text}process with a noisier end, such as CosineBetas.")
    elif at_start > 0.05:
        text = f"samples start from pure noise where {at_start:.0%} of an image should remain; "
        yield warning("terminal SNR", f"{text}let the times of the solver start noisier.")
    else:
        yield ok("terminal SNR", text)


def check_label_dropout(run: ExaminedRun) -> Iterator[Finding]:
    """Check that the unconditional prediction, which guidance needs, is trained."""
    if not isinstance(module := run.module, DiffusionModule) or module.num_classes is None:
        return
    dropout, guidance = module.label_dropout, module.guidance
    text, fix = f"label_dropout={dropout:g}", "0.1 to 0.2 is usual."
    is_guided = isinstance(guidance, ClassifierFree) and guidance.scale != 1
    if is_guided and dropout == 0:
        text += f" never trains the unconditional prediction that {guidance} needs"
        yield problem("label dropout", f"{text}; {fix}")
    elif dropout > 0.5 or (is_guided and not 0.05 <= dropout <= 0.3):
        yield warning("label dropout", f"{text} is unusual; {fix}")
    elif dropout == 0:
        yield note("label dropout", f"{text}: samples cannot be guided without a classifier; {fix}")
    else:
        yield ok("label dropout", text)


def check_time(run: ExaminedRun) -> Iterator[Finding]:
    """Estimate the remaining time of a run, and how much of it goes to validation and sampling."""
    training = ((run.num_steps or 0) - run.start_step) * run.step_seconds
    if not training > 0:  # no steps are left, or their number or duration is unknown
        return
    accumulate = run.trainer.accumulate_grad_batches
    batches, limit = run.num_val_batches, run.trainer.limit_val_batches
    if not (isinstance(limit, int) and batches >= limit):  # an int counts the batches of each rank
        batches /= run.ranks
    batches *= run.count_rounds(run.validation_interval)
    validation = batches * run.step_seconds / accumulate / 3  # without the backward pass
    generated = sum(grid.num * run.count_rounds(grid.every_n_steps) for grid in run.grids)
    for fid in run.evaluations:
        rounds = run.count_rounds(fid.every_n_steps) + fid.repeats_at_end
        generated += rounds * math.ceil(fid.num_samples / run.ranks)
    sampling = generated * run.sample_seconds
    total = training + validation + sampling
    days, hours = f"{total / 86400:,.0f} days", timedelta(seconds=round(total))
    text = f"about {days if total > 172800 else hours} on this {run.trainer.strategy.root_device}: "
    text += f"{run.step_seconds:.2g} s per step ({run.step_source}), {validation / total:.0%} of "
    text += f"it for validation, {sampling / total:.0%} for FIDs and sample grids"
    yield warning("time", text) if training < 0.5 * total else note("time", text)


def check_disk(run: ExaminedRun) -> Iterator[Finding]:
    """Check that checkpoints and snapshots of averages fit on the disk."""
    root, module = run.request.root, run.module
    weights = sum(v.nbytes for v in module.state_dict().values() if isinstance(v, Tensor))
    trained = sum(4 * p.numel() for p in module.parameters() if p.requires_grad)  # float32
    emas = [callback for callback in run.callbacks if isinstance(callback, EMA)]
    states = [e.values() for o in run.trainer.optimizers for e in o.state.values()]
    optimizer = sum(v.nbytes for values in states for v in values if isinstance(v, Tensor))
    optimizer = optimizer or 2 * trained  # Adam's, if no step was made
    checkpoint = weights + optimizer + sum(len(ema.decays) * trained for ema in emas)
    num = 2.0 + sum(getattr(c, "save_best", False) for c in run.callbacks)  # last.ckpt, its next
    for saver in [each for each in run.callbacks if isinstance(each, ModelCheckpoint)]:
        # All files of a saver without a limit stay.
        rounds = run.count_rounds(save_interval(saver)) or math.inf
        num += bool(saver.save_last) + (rounds if saver.save_top_k < 0 else saver.save_top_k)
    files = [f for pattern in ("*.ckpt", "*.ckpt/*") for f in root.glob(f"checkpoints/{pattern}")]
    needed = num * checkpoint - sum(file.stat().st_size for file in files)
    for ema in emas:
        if every := getattr(ema, "snapshot_every_n_steps", None):
            needed += run.count_rounds(every) * len(ema.decays) * trained
    folder = next(path for path in (root, *root.absolute().parents) if path.exists())
    free, gb = shutil.disk_usage(folder).free, 1e9
    text = f"{num:.0f} checkpoints of {checkpoint / gb:.3g} GB, {max(needed, 0) / gb:.3g} GB more "
    text += f"needed, {free / gb:.3g} GB free"
    if math.isinf(needed):
        yield warning("disk", f"{text}: none is ever deleted; set save_top_k of ModelCheckpoint.")
    elif needed > free:
        yield problem("disk", f"{text}; choose another --trainer.default_root_dir.")
    else:
        yield ok("disk", text)


CHECKS: tuple[Callable[[ExaminedRun], Iterator[Finding]], ...]
CHECKS = (check_ranks, check_threads, check_length, check_intervals, check_lr, check_ema)
CHECKS += (check_terminal_snr, check_label_dropout, check_time, check_disk)


def examine(options: Sequence[str], seconds: float = 5.0) -> Iterator[Finding]:
    """Yield findings about the run of `fit` with these options.

    Each measurement of speed takes about `seconds` seconds.
    """
    with ExitStack() as contexts:
        try:
            request = read_command_line(["fit", *options])
            contexts.enter_context(allow_class_paths(request.trust))
            folder = contexts.enter_context(tempfile.TemporaryDirectory())
            cli = FitOnOneProcess(request, contexts, folder)
        except Exception as error:  # constructors may raise anything
            yield problem("config", describe_failure(error))
            return
        run = ExaminedRun(cli, seconds)
        yield from (problem(*failure) for failure in run.failures)
        if run.missing_data is not None:
            yield warning("data", f"{run.missing_data}; the run was not started here.")
        for check in CHECKS:
            try:
                yield from check(run)
            except Exception as error:  # objects of other packages may have unexpected attributes
                yield problem(check.__name__, describe_failure(error))


def report(findings: Sequence[Finding]) -> str:
    """Text of the report: a line for each finding, most serious first, and a summary."""
    ordered = sorted(findings, key=lambda finding: -finding.level)
    width = max((len(finding.topic) for finding in ordered), default=0)
    lines = []
    for finding in ordered:
        level = "OK" if finding.level is Level.OK else finding.level.name.lower()
        lines.append(f"{level:<7}  {finding.topic:<{width}}  {' '.join(finding.text.split())}")
    levels = [finding.level for finding in ordered]
    problems, num_warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    verdict = f"{problems} problem(s), {num_warnings} warning(s)"
    if problems:
        verdict += ": the run would fail or be wasted."
    return "\n".join([*lines, "", verdict])
