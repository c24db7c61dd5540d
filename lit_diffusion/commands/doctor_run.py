"""What the doctor finds on the run of a config, the cheapest first."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import nn
from torch.optim import Optimizer

from lit_diffusion.checkpoints import misfits, read_checkpoint, uncompiled
from lit_diffusion.commands.doctor_checks import check_plan
from lit_diffusion.commands.doctor_machine import (
    check_placement,
    check_workers,
    existing,
    in_short,
    usable_cores,
)
from lit_diffusion.commands.doctor_method import (
    Labels,
    Noise,
    check_labels,
    check_noise,
)
from lit_diffusion.commands.doctor_plan import Plan
from lit_diffusion.commands.doctor_ranks import check_launch
from lit_diffusion.commands.doctor_rehearsal import Data, Rehearsal, data_of, plan_of
from lit_diffusion.commands.doctor_report import Finding, count, has_problem, note, ok, problem
from lit_diffusion.commands.doctor_storage import (
    Storage,
    averages_bytes,
    check_storage,
    grid_bytes,
    kept_files,
    optimizer_bytes,
    state_bytes,
)
from lit_diffusion.commands.doctor_timing import (
    Stopwatch,
    Timing,
    check_timing,
    forward_context,
    forward_seconds,
    sampling_seconds,
    solver_times,
    timed,
)
from lit_diffusion.commands.run_folder import (
    CLAIM,
    Request,
    occupied,
    read_command_line,
    refuse_mixing,
)
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.metrics.protocols import FIDProtocol, InceptionV3Compat, match_channels
from lit_diffusion.modules.checks import check_data
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.trust import trusting

_INCEPTION_FEATURES = 2048

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
    if cli._is_trial:
        text = "fast_dev_run trains on a few batches and keeps nothing; below is the run without."
        yield note("trial", text)
    else:
        yield from check_folder(request)
    step, found = look_at_checkpoint(cli, request)
    yield from found
    extractors = [extractor_of(protocol) for protocol in _protocols(cli)]
    yield from check_extractors(extractors)
    if isinstance(cli.model, DiffusionModule):
        yield from check_noise(noise_of(cli.model))
        yield from check_labels(labels_of(cli.model))
    data = data_of(cli)
    yield from check_loading(cli, data)
    plan = with_features(plan_of(cli, data, step), extractors)
    yield from check_plan(plan)
    yield from check_storage(storage_of(cli, request.root, plan))
    yield from examine_time(cli, data, plan, extractors, seconds)


# The run folder


def check_folder(request: Request) -> Iterator[Finding]:
    """Whether the run may write where it would."""
    topic, root = "run folder", request.root
    there = existing(root)
    if root.exists() and not root.is_dir():
        yield problem(topic, f"{root} is a file; choose another --trainer.default_root_dir.")
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
    for name, (old, new) in cli._changed.items():
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


# Data and extractors


def check_loading(cli: Rehearsal, data: Data) -> Iterator[Finding]:
    """Whether the data are there, fit the module, and can be loaded by these processes."""
    if data.fault is not None:
        yield problem("data", data.fault)
        return
    if data.num_images is not None:
        yield ok("data", f"{data.num_images:,} training images, {data.val_images or 0:,} held out")
    if isinstance(cli.model, DiffusionModule):
        try:
            check_data(cli.datamodule, cli.model.image_shape, cli.model.num_classes)
        except ValueError as error:
            yield problem("data", str(error))
    local = cli.ranks().devices or 1
    yield from check_workers(data.workers, local, usable_cores())


def _protocols(cli: Rehearsal) -> list[FIDProtocol]:
    """Of the FIDEvaluation callbacks, in their order."""
    held = [getattr(callback, "protocol", None) for callback in cli.callbacks]
    return [protocol for protocol in held if isinstance(protocol, FIDProtocol)]


@dataclass(frozen=True)
class Extractor:
    """The network of an FID protocol.

    Attributes:
        protocol: of the FID.
        network: None where its weights are not there.
        num_features: None where not known.
        fault: why there is no network.
    """

    protocol: FIDProtocol
    network: nn.Module | None = None
    num_features: int | None = None
    fault: str | None = None


def extractor_of(protocol: FIDProtocol) -> Extractor:
    """The network of a protocol, or what is known without its weights."""
    try:
        protocol.check()
        network = protocol.build()
        return Extractor(protocol, network, int(network.num_features))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        known = _INCEPTION_FEATURES if isinstance(protocol, InceptionV3Compat) else None
        return Extractor(protocol, None, known, in_short(error))


def check_extractors(extractors: Iterable[Extractor]) -> Iterator[Finding]:
    """Whether the weights of the FIDs are there."""
    for each in extractors:
        if each.fault is not None:
            yield problem("FID weights", f"{each.protocol.name}: {each.fault}")


def with_features(plan: Plan, extractors: Sequence[Extractor]) -> Plan:
    """The plan with the number of features of each evaluation's extractor."""
    known = [None if each is None else each.num_features for each in extractors]
    evaluations = [
        replace(evaluation, num_features=num)
        for evaluation, num in zip(plan.evaluations, known, strict=True)
    ]
    return replace(plan, evaluations=tuple(evaluations))


# Disk


def storage_of(cli: Rehearsal, root: Path, plan: Plan) -> Storage:
    """What the run writes."""
    there = existing(root)
    shape = getattr(cli.model, "image_shape", None)
    checkpoints, weight_files = _files(cli, plan)
    grids = [
        grid_bytes(g.num, plan.times(g.every_n_steps) or 0, shape) for g in plan.grids if shape
    ]
    return Storage(
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


def _optimizer_state(cli: Rehearsal) -> int | None:
    try:
        return sum(optimizer_bytes(optimizer) for optimizer in _optimizers(cli))
    except Exception:  # an optimizer that cannot step on the meta device, or needs a Trainer
        return None


def _optimizers(cli: Rehearsal) -> list[Optimizer]:
    if isinstance(cli.model, DiffusionModule):
        return [cli.model._make_optimizer([p for p in cli.model.parameters() if p.requires_grad])]
    made = cli.model.configure_optimizers()
    made = made.get("optimizer") if isinstance(made, dict) else made
    return [made] if isinstance(made, Optimizer) else list(made)  # type: ignore[arg-type]


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


# Time


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
        if data.fault is None and (timing.step or 0.0) < seconds:
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
