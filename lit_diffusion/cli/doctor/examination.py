"""What the doctor finds, on this machine and on the run of a config, the cheapest first."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.callbacks.sample_grid import SampleGrid
from lit_diffusion.checkpoints.content import uncompiled
from lit_diffusion.checkpoints.loading import misfits
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.doctor.checks import (
    check_accumulation,
    check_batch,
    check_length,
    check_validation,
)
from lit_diffusion.cli.doctor.fid import check_evaluation, extractor_of
from lit_diffusion.cli.doctor.machine import check_machine, check_placement, existing
from lit_diffusion.cli.doctor.method import check_method
from lit_diffusion.cli.doctor.opening import ask_callbacks, open_data
from lit_diffusion.cli.doctor.plan import Plan, plan_of
from lit_diffusion.cli.doctor.ranks import check_launch
from lit_diffusion.cli.doctor.rehearsal import Rehearsal, started
from lit_diffusion.cli.doctor.report import Finding, Level, has_problem, note, ok, problem
from lit_diffusion.cli.doctor.schedules import check_course, check_ema, check_lr, check_power_ema
from lit_diffusion.cli.doctor.storage import check_storage, storage_of
from lit_diffusion.cli.doctor.timing import Looks, examine_time
from lit_diffusion.cli.run_folder import CLAIM, Request, occupied, read_command_line, refuse_mixing
from lit_diffusion.cli.trainer_settings import wrong_settings
from lit_diffusion.config.trust import trusting
from lit_diffusion.data.loaders import usable_cores
from lit_diffusion.modules.checks import unused_classes
from lit_diffusion.modules.diffusion import DiffusionModule


def examine(options: Sequence[str]) -> Iterator[Finding]:
    """All findings on a fit with these options; without any, on the machine alone."""
    least = Level.WARNING if options else Level.OK
    yield from (finding for finding in check_machine(Path.cwd()) if finding.level >= least)
    yield from examine_run(options) if options else check_launch(None, os.environ)


def examine_run(options: Sequence[str], seconds: float = 5.0) -> Iterator[Finding]:
    """Findings on the run of `fit` with these options, each measurement of some seconds."""
    with ExitStack() as held:
        try:
            request = read_command_line(["fit", *options])
            held.enter_context(trusting(request.trust))
            cli = Rehearsal(request, held)
        except Exception as error:  # constructors may say anything
            yield problem("config", str(error))
            return
        asked, checkpoint = cli.config_dump["trainer"], cli.config_dump["ckpt_path"]
        wrong = [problem("trainer", text) for text in wrong_settings(asked)]
        wrong += [problem("resume", text) for text in wrong_settings({}, checkpoint)]
        yield from wrong
        if wrong:
            return  # with which the Trainer counts as no fit does
        yield from check_start(cli, request)
        step, found = look_at_checkpoint(cli, request)
        yield from found
        callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
        looks = Looks(
            {c: extractor_of(c.protocol) for c in callbacks if isinstance(c, FIDEvaluation)},
            [c for c in callbacks if isinstance(c, SampleGrid)],
        )
        with started(cli):
            yield from open_data(cli)
            yield from _check_objects(cli, looks)
            plan = plan_of(cli.trainer, step)
            yield from _check_plan(cli, plan, looks)
            yield check_storage(storage_of(cli.trainer, request.root, plan))
            for schedule in cli.trainer.lr_scheduler_configs:
                if schedule.interval == "step" and plan.steps != 0:
                    yield from check_lr(schedule.scheduler, plan)
        yield from examine_time(cli, plan, looks, seconds)


def check_start(cli: Rehearsal, request: Request) -> Iterator[Finding]:
    """Whether the processes of the run come together, where they compute and write."""
    launch = check_launch(cli.ranks(), os.environ)
    yield from launch
    if cli.refusal is None:
        trainer, wanted = cli.trainer, cli.config_dump["trainer"]["accelerator"]
        device = trainer.strategy.root_device.type
        yield check_placement(device, wanted, trainer.num_devices, usable_cores())
    elif not has_problem(launch):
        yield problem("trainer", f"it refuses its settings: {cli.refusal}")
    if cli.was_trial:
        text = "fast_dev_run trains on a few batches and keeps nothing; below is the run without."
        yield note("trial", text)
    else:
        yield check_folder(request)


def check_folder(request: Request) -> Finding:
    """Whether the run may write where it would."""
    topic, root, other = "run folder", request.root, "choose another --trainer.default_root_dir."
    there = existing(root)
    for path in (root, *root.absolute().parents):
        if path.exists() and not path.is_dir():
            return problem(topic, f"{path} is a file; {other}")
    if not os.access(there, os.W_OK):
        return problem(topic, f"{there} cannot be written to; {other}")
    try:
        refuse_mixing(request)
        with occupied(root) if (root / CLAIM).is_file() else nullcontext():
            return ok(topic, str(root))
    except (ValueError, OSError) as error:
        return problem(topic, str(error))


def look_at_checkpoint(cli: Rehearsal, request: Request) -> tuple[int, list[Finding]]:
    """Step of the checkpoint that the run goes on from, 0 without, and whether it fits."""
    file = request.checkpoint
    if file is None:
        return 0, []
    checkpoint = read_checkpoint(file, mmap=True)
    step = int(checkpoint.get("global_step", 0))
    differences = misfits(cli.model, uncompiled(checkpoint["state_dict"]))
    if differences:
        text = f"{file} is of another architecture than the config: {'; '.join(differences[:2])}"
        return step, [problem("resume", f"{text}.")]
    found = [ok("resume", f"goes on from step {step:,} of {file}")]
    for name, (old, new) in cli.changed.items():
        found.append(note("resume", f"the checkpoint had {name} {old}, the run uses {new}."))
    return step, found


def _check_objects(cli: Rehearsal, looks: Looks) -> Iterator[Finding]:
    """What the parts of the run say of themselves and of each other."""
    faults = {x.fault: e.protocol.name for e, x in looks.evaluations.items() if x.fault}
    yield from (problem("FID weights", f"{name}: {fault}") for fault, name in faults.items())
    if isinstance(cli.model, DiffusionModule):
        yield from check_method(cli.model)
    if cli.trainer.train_dataloader is None and cli.trainer.max_epochs != -1:
        yield note("callbacks", "not asked: without its data, the length of the run is not known.")
        return
    if getattr(cli.model, "conditioning", ...) is None and (said := unused_classes(cli.datamodule)):
        yield note("classes", said)
    try:
        cli.trainer.strategy.setup_optimizers(cli.trainer)
    except Exception as error:  # constructors may say anything
        yield problem("optimizer", str(error))
    yield from ask_callbacks(cli, faults)


def _check_plan(cli: Rehearsal, plan: Plan, looks: Looks) -> Iterator[Finding]:
    """Whether all of it fits the length of the run."""
    trainer = cli.trainer
    is_chosen = cli.config_dump["trainer"]["max_epochs"] is not None or trainer.max_epochs == -1
    yield check_length(plan, is_chosen)
    if not plan.steps:
        return
    yield from check_batch(plan)
    if trainer.check_val_every_n_epoch is None:
        yield from check_accumulation(trainer.val_check_interval, plan.accumulate)
    yield from check_validation(plan)
    for evaluation, extractor in looks.evaluations.items():
        yield from check_evaluation(evaluation, extractor.num_features, plan)
    every = [plan.steps_between_validations, *(e.every_n_steps for e in looks.evaluations)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PowerEMA):
            yield from check_power_ema(callback, plan)
        elif isinstance(callback, EMA):
            yield from check_ema(callback, plan, every)
        else:
            yield from check_course(callback, plan)
