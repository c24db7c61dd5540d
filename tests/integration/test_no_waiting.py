"""Between logging steps a training step never waits for the device, nor does sampling."""

import contextlib
import math
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector
from support.commands import call
from support.small_digits import small_digits
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from support.tiny_run import spec, write_config
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diffusion.callbacks import finite_updates, progress, trainer_state
from lit_diffusion.conditioning import ClassLabels
from lit_diffusion.gaussian import FixedLarge, LearnedRange
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.losses import HybridLoss, Simple
from lit_diffusion.modules.checks import FiniteDenoise
from lit_diffusion.processes import EDMProcess, LinearFlow
from lit_diffusion.seeding import PerSampleNoise
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, DPMSolverPP2S, Euler, Heun, UniPC

WAITS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "item"),
    *("nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique2", "unique_consecutive"),
    *("repeat_interleave", "bincount", "allclose", "_linalg_check_errors"),
}
"""Operations of torch after which the host has a value or a shape that the device computed."""


class CountWaits(TorchDispatchMode):
    """Appends to `waits` the operations that would wait for a GPU, and the line of code."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        has_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in WAITS or has_mask:
            self.waits.append(where(name))
        return function(*args, **kwargs or {})


def where(name):
    """The operation, and the innermost lines of code that are not torch's."""
    frames = [f for f in traceback.extract_stack()[:-2] if "/torch/" not in f.filename]
    return " < ".join([name, *(f"{f.filename[-40:]}:{f.lineno}" for f in reversed(frames[-5:]))])


class Watched:
    """Training steps that are not logging steps run in a context.

    Args:
        context: called for each such step.
        first: number of batches that are not watched, which may wait to set things up.

    Attributes:
        steps: how many steps were watched.
    """

    def __init__(self, monkeypatch, context, first):
        self.context, self.skip, self.steps = context, first, 0
        self.active, self.is_active = contextlib.ExitStack(), False
        connector = logger_connector._LoggerConnector
        wrap(monkeypatch, connector, "on_batch_start", self.enter)
        wrap(monkeypatch, connector, "update_train_step_metrics", self.leave)

    def enter(self, original, connector, *args, **kwargs):
        original(connector, *args, **kwargs)
        if connector.trainer.training and not connector.should_update_logs:
            self.skip -= 1
            if self.skip < 0:
                self.steps += 1
                self.active.enter_context(self.context())
                self.is_active = True

    def leave(self, original, connector):
        original(connector)
        self.close()

    def close(self):
        self.is_active = False
        self.active.close()


def wrap(monkeypatch, owner, name, wrapper):
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kw: wrapper(original, *args, **kw))


@pytest.fixture
def watched(monkeypatch):
    """Steps of a fit on the CPU, which takes the ways of one on a GPU."""
    waits = []
    watched = Watched(monkeypatch, partial(CountWaits, waits), first=1)
    watched.waits = waits

    def count(original, *args, **kwargs):
        if watched.is_active:
            waits.append(where(original.__name__))
        return original(*args, **kwargs)

    def let_through(original, *args):  # of what is on the CPU beside a GPU as well
        with torch.utils._python_dispatch._disable_current_modes():
            return original(*args)

    for name in ("cpu", "numpy", "tolist", "__array__"):
        wrap(monkeypatch, torch.Tensor, name, count)
    wrap(monkeypatch, finite_updates._Unread, "is_skipped", let_through)
    wrap(monkeypatch, ClassLabels, "check", let_through)  # in the first batch alone on a GPU
    monkeypatch.setattr(finite_updates, "_DEFERRING_DEVICES", ("cpu",))
    for file in (progress, trainer_state):
        monkeypatch.setattr(file, "may_read", trainer_state.should_log)
    norms = partial(trainer_state._has_infinite_norm, order=math.inf)  # a CPU has a faster way
    monkeypatch.setattr(finite_updates, "is_nonfinite", norms)
    yield watched
    watched.close()


CURRICULUM = [spec("TimestepCurriculum", num_steps=20), spec("MomentumDecay")]
RESAMPLER = [spec("LossSecondMomentResampler", num_bins=8, history=2), spec("LRCompensation")]


def fit(folder, monkeypatch, callbacks, *, every=10, fused=None, **trainer):
    """Train by the command line, three times to the next step with logs, samples and a save."""
    monkeypatch.chdir(folder)
    intervals = {"log_every_n_steps": every, "val_check_interval": every}
    config = small_digits(3 * every, limit_val_batches=1, **intervals)
    config["data"]["init_args"]["batch_size"] = 12 * every
    config["trainer"] |= {"gradient_clip_val": 1.0, "check_val_every_n_epoch": None, **trainer}
    config["trainer"]["callbacks"] = [
        spec("EMA", decays=[0.9, 0.99]),
        spec("SampleGrid", num=4, every_n_steps=every),
        spec("LearningRateMonitor"),
        *callbacks,
    ]
    config["model"]["init_args"]["optimizer"]["init_args"]["fused"] = fused
    config["model"]["init_args"]["times"] = spec("lit_diffusion.timesteps.LogNormal")
    write_config(config, Path("fit.yaml"))
    assert call("fit --config fit.yaml") == 0


@pytest.mark.parametrize(
    ("callbacks", "trainer"),
    [
        (CURRICULUM, {}),
        ([spec("InfoNoise", num_bins=8, history=2)], {}),
        (  # with fused=True in its arguments, Lightning refuses to clip under mixed precision
            RESAMPLER,
            {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": None},
        ),
    ],
)
def test_a_step_of_fit_with_its_callbacks_waits_for_nothing(
    tmp_path, monkeypatch, watched, callbacks, trainer
):
    fit(tmp_path, monkeypatch, callbacks, fused=True, **trainer)
    assert watched.waits == []
    assert watched.steps == (49 if trainer else 26)


class Waiting(TinyNetwork):
    """Looks at its input."""

    def forward(self, x, noise_label, labels):
        return super().forward(x, noise_label, labels) * (1 if x.any() else 0)


def test_a_step_that_waits_is_seen(watched):
    trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(tiny_diffusion(network=Waiting()), images(32, 8))
    assert any(text.startswith("_local_scalar_dense") for text in watched.waits)


# On a GPU torch itself says where it waits


@contextlib.contextmanager
def record_waits(waits):
    """Append the lines of code that wait for the GPU."""

    def show(message, *_, **__):
        if "synchronizing" in str(message):
            waits.append(where("wait"))

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "callbacks"),
    [("32-true", CURRICULUM), ("bf16-mixed", RESAMPLER), ("16-mixed", CURRICULUM)],
)
def test_a_step_of_fit_on_a_gpu_waits_for_nothing(tmp_path, monkeypatch, precision, callbacks):
    waits = []
    watched = Watched(monkeypatch, partial(record_waits, waits), first=5)
    options = {"accelerator": "gpu", "devices": 1, "precision": precision}
    with contextlib.closing(watched):
        fit(tmp_path, monkeypatch, callbacks, every=4, **options)
    most = watched.steps if precision == "16-mixed" else 0  # that of the GradScaler
    assert len(waits) <= most, Counter(waits).most_common(8)
    assert watched.steps == 4


class TwoOutputs(TinyNetwork):
    """Of a mean and a variance."""

    def forward(self, x, noise_label, labels):
        return super().forward(x, noise_label, labels).repeat(1, 2, 1, 1)


LEARNED_VARIANCE = {"network": TwoOutputs(), "loss": HybridLoss(Simple())}


each_solver = pytest.mark.parametrize(
    ("solver", "changes"),
    [
        (DDIM(4), {}),
        (DDIM(4, eta=0.5), {}),
        (DDPM(FixedLarge(), 4), {}),
        (DPMSolverPP(4, order=3, eta=1.0), {}),
        (DPMSolverPP2S(4, eta=0.5), {}),
        (Heun(4, churn=4.0), {}),
        (UniPC(4, order=3), {}),
        (Euler(4), {"process": LinearFlow()}),
        (Heun(4), {"process": EDMProcess()}),
        (DDPM(LearnedRange(), 4), LEARNED_VARIANCE),
    ],
    ids=repr,
)


@each_solver
def test_no_step_of_a_solver_reads_a_value(solver, changes):
    """Tensors of the meta device have none."""
    module = tiny_diffusion(solver=solver, **changes).to("meta")
    denoise, noise = FiniteDenoise(module.denoise_for(None)), PerSampleNoise(range(4))
    x = torch.empty(4, 1, 8, 8, device="meta")
    assert solver.sample(denoise, module.process, x, noise.randn_like).is_meta


@pytest.mark.gpu
@each_solver
def test_sampling_on_a_gpu_waits_once_at_its_end(solver, changes):
    module = tiny_diffusion(solver=solver, **changes)
    expected, module = module.generate(range(4)), module.cuda()
    module.generate(range(4))  # tables of the process are copied once
    waits = []
    with record_waits(waits):
        images = module.generate(range(4))
    assert len(waits) == 1, waits  # whether all samples are finite
    assert (images.cpu().int() - expected.int()).abs().max() <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("interval", [(0.0, math.inf), (0.1, 5.0)])
def test_guidance_on_a_gpu_waits_in_its_first_call_alone(interval):
    module = tiny_diffusion(guidance=ClassifierFree(2.0, interval=interval)).cuda()
    module.generate(range(4))
    waits = []
    with record_waits(waits):
        module.generate(range(4))
    assert len(waits) <= 3, waits
