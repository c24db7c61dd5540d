import copy
import math
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer, trainable
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from torch import nn
from torch.utils._pytree import tree_map_only

from lit_diffusion.callbacks import EMA, FiniteUpdates, PowerEMA, finite_updates
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO

NAN = math.nan
fused_adam = partial(torch.optim.AdamW, fused=True)


class Spoilt(PlainModule):
    """Its loss is not finite in the batches `losses`, its gradient alone in `gradients`."""

    def __init__(self, losses=(), gradients=(), value=NAN, **options):
        super().__init__(**options)
        self.bad_losses, self.bad_gradients, self.value = losses, gradients, value
        self.unused = nn.Parameter(torch.zeros(1))  # has no gradient

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx in self.bad_losses:
            return loss * self.value
        if batch_idx in self.bad_gradients:
            zero = self.inner[0].weight.sum() * 0
            return loss + (zero * zero).sqrt()  # 0, with 0 / 0 for a gradient
        return loss


class State(Callback):
    """What an update may change, before the first step and after each batch."""

    def __init__(self, ema=None):
        self.ema, self.snapshots = ema, []

    def on_train_batch_start(self, trainer, pl_module, *args):
        if not self.snapshots:
            self._add(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self._add(trainer, pl_module)

    def _add(self, trainer, module):
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        ema = None if self.ema is None else self.ema.state_dict()
        state = trainable(module), optimizers, ema, dict(module.named_buffers())
        self.snapshots.append(on_cpu(copy.deepcopy(state)))


def on_cpu(nested):
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, nested)


def is_moved(before, after, name="inner.0.weight"):
    return not torch.equal(after[0][name], before[0][name])


def fit(folder, module, guard, *callbacks, data=None, **options):
    options = {"plugins": [AtomicCheckpointIO()], **options}
    trainer = make_trainer(folder, *callbacks, guard, **options)
    trainer.fit(module, data or loader(48, 8))
    return trainer


def dump(folder, rank=0):
    return torch.load(folder / f"non-finite-rank{rank}.ckpt", weights_only=True)


@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_an_update_that_is_not_finite_is_skipped_as_a_whole(tmp_path, where):
    module = Spoilt(optimizer=torch.optim.AdamW, **{where: (1, 3)})
    ema = EMA((0.9,))
    state, guard = State(ema), FiniteUpdates(max_nonfinite_steps=2)
    trainer = fit(tmp_path, module, guard, ema, state)
    for batch in range(6):
        before, after = state.snapshots[batch], state.snapshots[batch + 1]
        if batch in (1, 3):
            assert_same_bits(after, before)
        else:
            assert is_moved(before, after)
            assert set(after[2]["steps"].values()) != set(before[2]["steps"].values())
    assert (guard.skipped_updates, trainer.global_step) == (2, 6)


def test_buffers_that_modules_get_during_the_fit_are_restored_too(tmp_path):
    class Growing(Spoilt):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.late = nn.Module()
            if batch_idx == 1:
                self.late.register_buffer("count", torch.zeros(()))
            if batch_idx > 1:
                self.late.count += 1
            return super().training_step(batch, batch_idx)

    module, state = Growing(losses=(3,)), State()
    fit(tmp_path, module, FiniteUpdates(max_nonfinite_steps=1), state)
    counts = [snapshot[3].get("late.count") for snapshot in state.snapshots]
    assert counts == [None, None, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("shape", [(3,), (3, 2)])  # the second can be broadcast to
def test_a_buffer_that_a_module_replaced_by_one_of_another_shape_is_restored(tmp_path, shape):
    class Replacing(Spoilt):
        def __init__(self, **options):
            super().__init__(**options)
            self.register_buffer("queue", torch.zeros(2))

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.queue = torch.ones(shape)
            loss = super().training_step(batch, batch_idx)
            self.queue += 1
            return loss

    module, state = Replacing(losses=(1,)), State()
    fit(tmp_path, module, FiniteUpdates(max_nonfinite_steps=1), state)
    queues = [snapshot[3]["queue"].tolist() for snapshot in state.snapshots]
    assert queues == [[n, n] for n in (0, 1, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("losses", r"^the loss is not finite at optimizer step 2 \(batch 2, rank 0\)\. "),
        ("gradients", r"^the gradient is not finite at optimizer step 2 .*: of inner.0.weight\. "),
    ],
)
def test_the_first_stops_a_run_unless_some_are_allowed(tmp_path, where, message):
    module, state, logger = Spoilt(**{where: (2,)}), State(), MemoryLogger()
    message += r".*non-finite-rank0.ckpt holds .*\(1 of at most 0: max_nonfinite_steps\)"
    with pytest.raises(FloatingPointError, match=message):
        fit(tmp_path, module, FiniteUpdates(), state, logger=logger, log_every_n_steps=1)
    assert_same_bits(state.snapshots[-1], state.snapshots[-2])
    assert len(state.snapshots) == 4
    assert [(step, math.isnan(loss)) for step, loss in logger.of("train/loss")] == [(2, True)]


def test_a_run_continues_until_more_are_skipped_than_may_be(tmp_path, caplog):
    logger, guard = MemoryLogger(), FiniteUpdates(max_nonfinite_steps=2)
    caplog.set_level("INFO")
    with pytest.raises(FloatingPointError, match=r"step 5 .*\(3 of at most 2"):
        fit(tmp_path, Spoilt(losses=(1,), gradients=(3, 5)), guard, logger=logger)
    skips = re.findall(r"Skipped an update \((\d of .*?)\).*step (\d)", caplog.text)
    assert skips == [("1 of at most 2", "1"), ("2 of at most 2", "3")]
    assert logger.of("train/nonfinite_steps") == [(1, 1.0), (3, 2.0), (5, 3.0)]
    assert dump(tmp_path)["global_step"] == 5


def test_skipped_updates_are_counted_across_a_resume(tmp_path):
    trainer = fit(tmp_path, Spoilt(losses=(1,)), FiniteUpdates(1))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]
    assert saved["FiniteUpdates"] == {"skipped_updates": 1}
    assert FiniteUpdates().state_dict() == {}  # as without the callback, until there are some
    again = make_trainer(tmp_path, FiniteUpdates(1), max_epochs=2, plugins=[AtomicCheckpointIO()])
    with pytest.raises(FloatingPointError, match="2 of at most 1"):
        again.fit(Spoilt(losses=(1,)), loader(48, 8), ckpt_path=tmp_path / "end.ckpt")


class Overflowing(TinyNetwork):
    """Its output is infinite where t >= 75, from the call `since` on."""

    def __init__(self, since):
        super().__init__()
        self.since, self.calls = since, 0

    def forward(self, x, noise_label, labels):
        self.calls += 1
        bad = (noise_label >= 75) & (self.calls > self.since)
        out = super().forward(x, noise_label, labels)
        return torch.where(bad.view(-1, 1, 1, 1), torch.inf, out)


def test_samples_noise_levels_and_data_indices_are_named(tmp_path):
    module = tiny_diffusion(network=Overflowing(since=2))
    with pytest.raises(FloatingPointError) as error:
        fit(tmp_path, module, FiniteUpdates(), data=images(64, 16), log_every_n_steps=1)
    sample, index, u, quartile, t = re.search(
        r"step 2 \(batch 2, rank 0\): sample (\d+) \(data index (\d+)\) at u = ([\d.]+) "
        r"\(train/loss_q(\d)\), t = (\d+);",
        str(error.value),
    ).groups()
    assert int(index) == 32 + int(sample)
    assert (int(quartile), int(t) >= 75) == (int(float(u) * 4), True)
    outputs = dump(tmp_path)["non_finite"]["outputs"]
    bad = ~outputs["per_sample_loss"].isfinite()
    assert torch.equal(bad, outputs["t"] >= 75)
    assert f"and {int(bad.sum()) - 3} more" in str(error.value)


def test_weights_that_were_not_finite_before_are_distinguished_from_a_bad_step(tmp_path):
    module = PlainModule()
    torch.nn.init.constant_(module.inner[0].bias, NAN)
    text = "the weights were not finite before the update at optimizer step 0 .*inner.0.bias"
    with pytest.raises(FloatingPointError, match=text):
        fit(tmp_path, module, FiniteUpdates())


def test_the_file_has_what_repeats_the_step_to_the_last_bit(tmp_path):
    class Noisy(Spoilt):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "finite": torch.tensor(self.losses[-1])}

    with pytest.raises(FloatingPointError):
        fit(tmp_path, Noisy(losses=(2,)), FiniteUpdates())
    content, module = dump(tmp_path), Noisy()
    failure = content["non_finite"]
    module.load_state_dict(content["state_dict"])
    torch.set_rng_state(failure["rng"]["cpu"])
    again = module.training_step(failure["batch"], failure["batch_idx"])
    assert torch.equal(again["finite"], failure["outputs"]["finite"])


# Accumulation, manual optimization, GradScaler


@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_of_accumulated_batches_none_counts_and_the_bad_one_is_saved(tmp_path, where):
    state, guard, data = State(), FiniteUpdates(1), loader(72, 8)
    module = Spoilt(**{where: (4,)})
    trainer = fit(tmp_path, module, guard, state, data=data, accumulate_grad_batches=3)
    _, first, second, third = state.snapshots[::3]
    assert_same_bits(second, first)
    assert is_moved(second, third)  # by an update without the batches before
    assert (guard.skipped_updates, trainer.global_step) == (1, 3)
    failure = dump(tmp_path)["non_finite"]
    assert failure["batch_idx"] == 4
    assert_same_bits(failure["batch"][0], list(data)[4][0])


class Two(Spoilt):
    """Steps one optimizer for each end of the network; (batch, optimizer) have bad losses."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for i, optimizer in enumerate(self.optimizers()):
            self.inner.zero_grad()
            loss = self.loss(batch) if i else super().training_step(batch, batch_idx)
            self.manual_backward(loss * (NAN if (batch_idx, i) in self.bad_losses else 1))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.inner[i].parameters()) for i in (0, 3)]


def test_in_manual_optimization_the_updates_from_the_bad_one_on_are_skipped(tmp_path):
    state, guard = State(), FiniteUpdates(2)
    make_trainer(tmp_path, guard, state).fit(Two(losses={(1, 0), (3, 1)}), loader(48, 8))
    _, before, skipped, third, fourth, *_ = state.snapshots
    assert_same_bits(skipped, before)  # buffers too, which the second network has changed since
    assert is_moved(third, fourth, "inner.0.weight")
    assert not is_moved(third, fourth, "inner.3.weight")
    assert guard.skipped_updates == 2


def test_in_manual_optimization_the_optimizers_own_gradients_are_named(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step 0 .*: of inner.0.weight\. /"):
        fit(tmp_path, Two(gradients=(0,)), FiniteUpdates())


class Scales(Callback):
    """The scale at each update, before it is changed."""

    def __init__(self):
        self.scales = []

    def on_before_optimizer_step(self, trainer, *args):
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def scaled(init_scale=4.0):
    """Options of `fit` for a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_searches_for_its_scale_undisturbed(tmp_path, fused):
    module, ema = PlainModule(optimizer=partial(torch.optim.Adam, fused=fused)), EMA((0.9,))
    state, scales, guard = State(ema), Scales(), FiniteUpdates()
    fit(tmp_path, module, guard, ema, state, scales, **scaled(2.0**19))
    skipped = [i for i in range(6) if scales.scales[i] > min(scales.scales)]
    assert 1 <= len(skipped) <= 5
    for i in skipped:
        assert_same_bits(state.snapshots[i + 1][::2], state.snapshots[i][::2])  # weights and EMA
    assert (ema.steps, guard.skipped_updates) == (6 - len(skipped), 0)


@pytest.mark.parametrize(("value", "fused"), [(math.inf, False), (math.nan, True)])
def test_under_a_grad_scaler_a_loss_that_is_not_finite_counts(tmp_path, value, fused):
    class Constant(Spoilt):
        """Of a gradient that is finite, so that the scaler has nothing to skip for."""

        def training_step(self, batch, batch_idx):
            loss = PlainModule.training_step(self, batch, batch_idx)
            return loss + (self.value if batch_idx in self.bad_losses else 0)

    optimizer, ema = partial(torch.optim.Adam, fused=fused), EMA((0.9,))
    module, guard = Constant(losses=(1,), value=value, optimizer=optimizer), FiniteUpdates(1)
    fit(tmp_path, module, guard, ema, state := State(ema), **scaled())
    assert_same_bits(state.snapshots[2][::2], state.snapshots[1][::2])
    assert (ema.steps, guard.skipped_updates) == (5, 1)


def test_a_gradient_that_no_scale_makes_finite_counts_once_the_scale_is_one(tmp_path):
    module, guard, scales = Spoilt(gradients=range(6)), FiniteUpdates(), Scales()
    message = r"the gradient is not finite at optimizer step 2 .*The loss scale is 0\.5\."
    with pytest.raises(FloatingPointError, match=message):
        fit(tmp_path, module, guard, scales, **scaled(4.0))
    assert scales.scales == [4.0, 2.0, 1.0]


def test_weights_that_the_last_update_ruined_are_logged_as_a_loss_of_nan_and_not_saved(tmp_path):
    logger = MemoryLogger()
    trainer = fit(tmp_path, PlainModule(lr=math.inf), FiniteUpdates(), logger=logger, max_steps=1)
    with pytest.raises(FloatingPointError, match=r"weights of step 1 are not finite .* inner\.0"):
        trainer.save_checkpoint(tmp_path / "1.ckpt")
    assert not list(tmp_path.glob("*.ckpt"))
    assert [math.isnan(loss) for _, loss in logger.of("train/loss")] == [True]


# Skipped on the device, and read later


@pytest.fixture
def deferred(monkeypatch):
    """As on CUDA: a fused optimizer of the CPU skips by the same attribute."""
    monkeypatch.setattr(finite_updates, "_DEFERRING_DEVICES", ("cpu", "cuda"))


def stop(folder, module, *callbacks, **options):
    """Fit until the run stops; the message, and what was logged."""
    logger = MemoryLogger()
    options = {"log_every_n_steps": 50, "data": loader(96, 8), **options}
    with pytest.raises(FloatingPointError) as error:
        fit(folder, module, FiniteUpdates(), *callbacks, logger=logger, **options)
    return str(error.value), logger


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_the_device_skips_all_updates_from_the_bad_one_on(tmp_path, deferred, where, device):
    """They stay those of a run that waits, and so do the message, the file and the log."""
    results = []
    for fused in (True, False):
        module = Spoilt(optimizer=fused_adam if fused else torch.optim.AdamW, **{where: (5,)})
        ema = EMA((0.9,), buffers=True)
        state = State(ema)
        message, logger = stop(tmp_path, module, ema, state, accelerator=device)
        assert len(state.snapshots) == 1 + (10 if fused else 6)
        optimizer = module.trainer.optimizers[0]
        assert not hasattr(optimizer, "found_inf")
        assert_same_bits(optimizer.state_dict()["state"], state.snapshots[5][1][0]["state"])
        assert_same_bits(trainable(module), state.snapshots[5][0])
        assert_same_bits(on_cpu(ema.state_dict()), state.snapshots[5][2])
        assert ema.steps == 5
        assert_same_bits(dict(module.named_buffers()), state.snapshots[5][3])
        number = "" if fused else "-v1"  # the second fit does not replace the file of the first
        file = torch.load(tmp_path / f"non-finite-rank0{number}.ckpt", weights_only=True)
        assert f"non-finite-rank0{number}.ckpt holds" in message
        message = message.replace(number, "")
        results.append([message, logger.of("train/loss"), file["non_finite"]])
    assert results[0][0] == results[1][0]
    assert "at optimizer step 5 (batch 5, rank 0)" in results[0][0]
    assert [(step, math.isnan(loss)) for step, loss in results[0][1]] == [(5, True)]
    for key in ("batch", "batch_idx", "rng", "parameters"):
        assert_same_bits(results[0][2][key], results[1][2][key])


def test_flags_are_read_before_a_logging_step_is_logged(tmp_path, deferred):
    state = State()
    stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), state, log_every_n_steps=2)
    assert len(state.snapshots) == 1 + 6


def test_flags_are_read_before_a_save(tmp_path, deferred):
    def save(trainer, *_):
        if trainer.global_step in (5, 7):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    saves = LambdaCallback(on_train_batch_end=save)
    message, _ = stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), saves)
    assert "at optimizer step 5 " in message
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"5.ckpt", "non-finite-rank0.ckpt"}


@pytest.mark.parametrize("bad", [5, 50])
def test_flags_are_read_before_a_save_after_an_exception(tmp_path, deferred, bad):
    dies = LambdaCallback(on_train_batch_start=lambda trainer, *_: 1 / (8 - trainer.global_step))
    trainer = make_trainer(tmp_path, dies, FiniteUpdates())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Spoilt(losses=(bad,), optimizer=fused_adam), loader(96, 8))
    refused = pytest.raises(FloatingPointError, match="step 8 is not saved")
    with refused if bad == 5 else nullcontext():
        trainer.save_checkpoint(tmp_path / "8.ckpt")
    assert (tmp_path / "8.ckpt").exists() == (bad != 5)


def test_flags_are_read_before_a_snapshot_of_averages(tmp_path, deferred):
    stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), PowerEMA(snapshot_every_n_steps=2))
    names = {path.name for path in tmp_path.glob("*/step-*")}
    assert names == {f"step-{step:09d}.safetensors" for step in (2, 4)}


@pytest.mark.parametrize("bad", [11, 23])
def test_flags_are_read_before_the_epoch_and_its_validation_end(tmp_path, deferred, bad):
    class Validates(Spoilt):
        def val_dataloader(self):
            return loader(8)

    module, validated = Validates(losses=(bad,), optimizer=fused_adam), []
    calls = LambdaCallback(on_validation_batch_start=lambda *args: validated.append(args))
    options = {"val_check_interval": 12, "check_val_every_n_epoch": None}
    options |= {"limit_val_batches": 0 if bad == 23 else 1, "num_sanity_val_steps": 0}
    with pytest.raises(FloatingPointError, match=f"optimizer step {bad} "):
        fit(tmp_path, module, FiniteUpdates(), calls, data=loader(192, 8), **options)
    assert not validated


@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_beside_a_grad_scaler_the_device_skips_what_is_not_the_scales_fault(
    tmp_path, deferred, where
):
    module, ema = Spoilt(optimizer=fused_adam, **{where: (3, 4, 5, 6, 7)}), EMA((0.9,))
    state = State(ema)
    message, _ = stop(tmp_path, module, ema, state, **scaled(4.0))
    first = 3 if where == "losses" else 5  # after scales of 4 and 2
    assert f"not finite at optimizer step {first} " in message
    assert_same_bits(trainable(module), state.snapshots[3][0])
    assert_same_bits(ema.state_dict()["shadows"], state.snapshots[3][2]["shadows"])
    assert ema.steps == 3


@pytest.mark.parametrize(
    ("optimizer", "skips"),
    [
        (partial(type("Mine", (torch.optim.AdamW,), {}), fused=True), 0),
        (torch.optim.AdamW, 0),
        (fused_adam, 1),
    ],
)
def test_what_the_device_cannot_skip_is_decided_at_once(tmp_path, deferred, optimizer, skips):
    module, guard, state = Spoilt(losses=(2, 3), optimizer=optimizer), FiniteUpdates(skips), State()
    with pytest.raises(FloatingPointError):
        fit(tmp_path, module, guard, state, log_every_n_steps=50)
    assert len(state.snapshots) == 1 + 3 + skips


# Odd cases


def test_negative_numbers_and_optimizers_that_compute_losses_in_their_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        FiniteUpdates(-1)
    with pytest.raises(ValueError, match="cannot skip an update of LBFGS"):
        fit(tmp_path, PlainModule(optimizer=torch.optim.LBFGS), FiniteUpdates())
