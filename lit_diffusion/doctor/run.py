"""What the doctor finds on the run of a config, the cheapest first."""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from lit_diffusion.checkpoints import misfits, read_checkpoint, uncompiled
from lit_diffusion.commands.run_folder import (
    CLAIM,
    Request,
    occupied,
    read_command_line,
    refuse_mixing,
)
from lit_diffusion.data.base import Awaited
from lit_diffusion.doctor.checks import check_plan
from lit_diffusion.doctor.extractors import (
    check_extractors,
    extractor_of,
    protocols_of,
    with_features,
)
from lit_diffusion.doctor.machine import (
    check_placement,
    check_workers,
    existing,
    usable_cores,
)
from lit_diffusion.doctor.method import (
    Labels,
    Noise,
    check_labels,
    check_noise,
)
from lit_diffusion.doctor.plan import Plan
from lit_diffusion.doctor.ranks import check_launch
from lit_diffusion.doctor.refusals import check_callbacks
from lit_diffusion.doctor.rehearsal import Data, Rehearsal, data_of, optimizers_of, plan_of
from lit_diffusion.doctor.report import Finding, has_problem, note, ok, problem, warning
from lit_diffusion.doctor.settings import check_precision, check_settings
from lit_diffusion.doctor.storage import (
    Storage,
    averages_bytes,
    check_storage,
    grid_bytes,
    kept_files,
    optimizer_bytes,
    replaced_bytes,
    state_bytes,
)
from lit_diffusion.doctor.timing import solver_times
from lit_diffusion.doctor.trial import examine_time
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.modules.checks import check_data
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.trust import trusting

SECONDS = 5.0
"""That each measurement may take, but for what it has begun."""


def examine_run(options: Sequence[str], seconds: float = SECONDS) -> Iterator[Finding]:
    """Findings on the run that `lit-diffusion fit` with these options would be.

    Args:
        options: of fit.
        seconds: for each of three measurements.
    """
    try:
        request = read_command_line(["fit", *options])
    except (ValueError, TypeError, OSError) as error:
        yield problem("config", str(error))
        return
    with trusting(request.trust), ExitStack() as held:
        try:
            cli = Rehearsal(request, held)
        except Exception as error:  # constructors may say anything
            yield problem("config", str(error))
            return
        yield from _examine(cli, request, seconds)


def _examine(cli: Rehearsal, request: Request, seconds: float) -> Iterator[Finding]:
    launch = check_launch(cli.ranks(), os.environ)
    yield from launch
    if cli.refusal is not None and not has_problem(launch):
        yield problem("trainer", f"it refuses its settings: {cli.refusal}")
    if cli.trainer is not None:
        device, wanted = cli.trainer.strategy.root_device.type, cli.settings["accelerator"]
        yield check_placement(device, wanted, cli.trainer.num_devices, usable_cores())
        yield from check_precision(cli.settings["precision"], cli.trainer.precision)
    yield from check_settings(cli.settings, cli.config_dump.get("ckpt_path"))
    if cli.is_trial:
        text = "fast_dev_run trains on a few batches and keeps nothing; below is the run without."
        yield note("trial", text)
    else:
        yield from check_folder(request)
    step, found = look_at_checkpoint(cli, request)
    yield from found
    extractors = [extractor_of(protocol) for protocol in protocols_of(cli)]
    yield from check_extractors(extractors)
    if isinstance(cli.model, DiffusionModule):
        yield from check_noise(noise_of(cli.model))
        yield from check_labels(labels_of(cli.model))
    data = data_of(cli)
    yield from check_loading(cli, data)
    yield from check_callbacks(cli, extractors)
    plan = with_features(plan_of(cli, data, step), extractors)
    yield from check_plan(plan)
    yield from check_storage(storage_of(cli, request.root, plan))
    yield from examine_time(cli, data, plan, extractors, seconds)


# The run folder


def check_folder(request: Request) -> Iterator[Finding]:
    """Whether the run may write where it would."""
    topic, root = "run folder", request.root
    there = existing(root)
    for path in (root, *root.absolute().parents):
        if path.exists() and not path.is_dir():
            yield problem(topic, f"{path} is a file; choose another --trainer.default_root_dir.")
            return
    if not os.access(there, os.W_OK):
        yield problem(
            topic, f"{there} cannot be written to; choose another --trainer.default_root_dir."
        )
        return
    try:
        refuse_mixing(request)
        with occupied(root) if (root / CLAIM).is_file() else nullcontext():
            pass
    except (ValueError, OSError) as error:
        yield problem(topic, str(error))
        return
    yield ok(topic, str(root))


def look_at_checkpoint(cli: Rehearsal, request: Request) -> tuple[int, list[Finding]]:
    """Step of the checkpoint that the run goes on from, 0 without, and whether it fits."""
    file = request.checkpoint
    if file is None or not file.is_file():
        if file is None:
            return 0, []
        return 0, [note("resume", f"there is no {file} yet: the run starts anew.")]
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


# Method


def noise_of(module: DiffusionModule) -> Noise:
    """The noisy end of the module's process, and where its solver begins."""
    process = module.process
    times = [process.t_max]
    asked = solver_times(module.solver, process)
    alpha, sigma = process.alpha_sigma(torch.tensor(times + asked[:1], dtype=torch.float64))
    name = type(getattr(process, "betas", process)).__name__
    return Noise(name, alpha[0].item(), sigma[0].item(), alpha[-1].item(), sigma[-1].item())


def labels_of(module: DiffusionModule) -> Labels:
    """How the module uses labels."""
    guidance = module.guidance
    needs = isinstance(guidance, ClassifierFree) and guidance.scale != 1
    name = None if guidance is None else repr(guidance)
    return Labels(module.num_classes, module.label_dropout, name, needs)


# Data


def check_loading(cli: Rehearsal, data: Data) -> Iterator[Finding]:
    """Whether the data are there, fit the module, and can be loaded by these processes."""
    if data.fault is not None:
        yield _unreadable(data.fault, data.prepares)
        return
    if data.awaited is not None:
        yield _awaited(data.awaited)
    if data.num_images is not None:
        yield ok("data", f"{data.num_images:,} training images, {data.val_images or 0:,} held out")
    if isinstance(cli.model, DiffusionModule):
        try:
            check_data(cli.datamodule, cli.model.image_shape, cli.model.num_classes)
        except ValueError as error:
            yield problem("data", str(error))
    local = cli.ranks().devices or 1
    yield from check_workers(data.workers, local, usable_cores())


def _unreadable(fault: str, prepares: bool) -> Finding:
    if prepares:
        text = f"not readable before prepare_data, which fit calls and this does not: {fault}"
        return warning("data", text)
    return problem("data", fault)


def _awaited(awaited: Awaited) -> Finding:
    if not awaited.needs_network:
        return note("data", f"{awaited.text}.")
    text = f"{awaited.text}: fit fails on a node without a network; put it there before."
    return warning("data", text)


# Disk


def storage_of(cli: Rehearsal, root: Path, plan: Plan) -> Storage:
    """What the run writes."""
    there = existing(root)
    shape = getattr(cli.model, "image_shape", None)
    checkpoints, weight_files = _files(cli, plan)
    grids = [
        grid_bytes(g.num, plan.times(g.every_n_steps) or 0, shape) for g in plan.grids if shape
    ]
    storage = Storage(
        folder=str(there),
        free=shutil.disk_usage(there).free,
        weights=state_bytes(cli.model),
        optimizer=_optimizer_state(cli),
        averages=sum(
            averages_bytes(cli.model, len(arguments["decays"]), arguments["prefix"])
            for name, arguments in cli.given_callbacks()
            if name == "EMA"
        ),
        checkpoints=checkpoints,
        weight_files=weight_files,
        samples=sum(grids),
    )
    kept = checkpoints + weight_files
    there_already = replaced_bytes(root / "checkpoints", kept, storage.checkpoint)
    return replace(storage, replaced=there_already)


def _optimizer_state(cli: Rehearsal) -> int | None:
    try:
        return sum(optimizer_bytes(optimizer) for optimizer in optimizers_of(cli.model))
    except Exception:  # an optimizer that cannot step on the meta device, or needs a Trainer
        return None


def _files(cli: Rehearsal, plan: Plan) -> tuple[float, float]:
    """Full checkpoints and those of weights alone that are kept at once."""
    full, light = 0.0, 0.0
    for callback in cli.callbacks:
        if isinstance(callback, ModelCheckpoint):
            kept = kept_files(callback.save_top_k, bool(callback.save_last), _saves(callback, plan))
            full += 0 if callback.save_weights_only else kept
            light += kept if callback.save_weights_only else 0
    others = [c for c in cli.callbacks if isinstance(c, Checkpoint)]
    # Several keep one file: last.ckpt.
    paths = {getattr(c, "path", c) for c in others if not isinstance(c, ModelCheckpoint)}
    best = sum(bool(getattr(callback, "save_best", False)) for callback in cli.callbacks)
    return full + len(paths) + best, light


def _saves(callback: ModelCheckpoint, plan: Plan) -> int | None:
    """Of a whole run; None where not known."""
    if callback._train_time_interval is not None or plan.steps is None:
        return None
    if callback._every_n_train_steps:
        return plan.steps // callback._every_n_train_steps
    if callback._every_n_epochs and plan.epochs is not None:
        return math.ceil(plan.epochs / callback._every_n_epochs)
    return None
