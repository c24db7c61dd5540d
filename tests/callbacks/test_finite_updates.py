import copy
import math
import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.memory_logger import MemoryLogger
from support.pictures_module import PicturesModule, pictures
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer, trainable
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from torch import nn
from torch.utils._pytree import tree_map_only

from lit_diffusion.callbacks import EMA, FiniteUpdates, PowerEMA, SampleGrid, finite_updates
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO


class Spoilt(PlainModule):
    """Its loss is not finite in the batches `losses`, its gradient alone in `gradients`."""

    def __init__(self, losses=(), gradients=(), value=math.nan, **options):
        super().__init__(**options)
        self.bad_losses, self.bad_gradients, self.value = losses, gradients, value

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
        buffers = dict(module.named_buffers())
        state = copy.deepcopy((trainable(module), optimizers, ema, buffers))
        self.snapshots.append(on_cpu(state))


def on_cpu(nested):
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, nested)


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
            assert not torch.equal(after[0]["inner.0.weight"], before[0]["inner.0.weight"])
            assert set(after[2]["steps"].values()) != set(before[2]["steps"].values())
    assert (guard.skipped_updates, trainer.global_step) == (2, 6)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Spoilt(losses=(2,)),
            r"^the loss is not finite at optimizer step 2 \(batch 2, rank 0\)\. "
            r"(.*non-finite-rank0.ckpt) holds the batch .* Its update was skipped "
            r"\(1 of at most 0: max_nonfinite_steps\); lower the lr",
        ),
        (
            Spoilt(gradients=(2,)),
            r"^the gradient is not finite at optimizer step 2 \(batch 2, rank 0\): of "
            r"inner.0.weight\. /",
        ),
    ],
)
def test_the_first_stops_a_run_unless_some_are_allowed(tmp_path, module, message):
    state, logger = State(), MemoryLogger()
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
    skips = [text for text in caplog.messages if "Skipped an update" in text]
    assert [re.search(r"\((\d of .*?)\).*step (\d)", text).groups() for text in skips] == [
        ("1 of at most 2", "1"),
        ("2 of at most 2", "3"),
    ]
    assert logger.of("train/nonfinite_steps") == [(1, 1.0), (3, 2.0), (5, 3.0)]
    assert dump(tmp_path)["global_step"] == 5


def test_skipped_updates_are_counted_across_a_resume(tmp_path):
    guard = FiniteUpdates(max_nonfinite_steps=1)
    trainer = fit(tmp_path, Spoilt(losses=(1,)), guard)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["FiniteUpdates"] == {
        "skipped_updates": 1
    }
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


class Reporting(Spoilt):
    """Its first batch has a loss that is not finite, and these outputs."""

    def __init__(self, **outputs):
        super().__init__(losses=(0,))
        self.outputs = outputs

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), **self.outputs}


NAN = math.nan


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (
            {"per_sample_loss": torch.tensor([1.0, math.inf]), "u": torch.tensor([0.1, 1.0])},
            r": sample 1 at u = 1\.000 \(train/loss_q3\)\. ",
        ),
        (
            {
                "per_sample_loss": torch.tensor([NAN, 1.0]),
                "u": torch.tensor([0.26, 1.0]),
                "t": torch.tensor([12.5, 3]),
            },
            r": sample 0 at u = 0\.260 \(train/loss_q1\), t = 12\.5\. ",
        ),
        (
            {"per_sample_loss": torch.tensor([NAN] * 5)},
            ": sample 0; sample 1; sample 2 and 2 more",
        ),
    ],
)
def test_samples_are_named_as_far_as_the_module_returns_them(tmp_path, outputs, text):
    with pytest.raises(FloatingPointError, match=rf"step 0 \(batch 0, .*{text}"):
        fit(tmp_path, Reporting(**outputs), FiniteUpdates())


def test_of_many_parameters_the_first_are_named_in_the_modules_order(tmp_path):
    class AllButOne(PlainModule):
        def training_step(self, batch, batch_idx):
            zeros = [p.sum() * 0 for name, p in self.inner.named_parameters() if name != "0.bias"]
            return super().training_step(batch, batch_idx) + sum((z * z).sqrt() for z in zeros)

        def configure_optimizers(self):
            return torch.optim.SGD([*reversed([*self.inner.parameters()])], lr=1)

    text = r"of inner\.0\.weight; inner\.1\.weight; inner\.1\.bias and 2 more"
    with pytest.raises(FloatingPointError, match=text):
        fit(tmp_path, AllButOne(), FiniteUpdates())


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
def test_of_accumulated_batches_none_counts_and_the_bad_one_is_dumped(tmp_path, where):
    state, guard = State(), FiniteUpdates(1)
    module = Spoilt(**{where: (3,)})
    data = loader(48, 8)
    trainer = fit(tmp_path, module, guard, state, data=data, accumulate_grad_batches=3)
    assert_same_bits(state.snapshots[6], state.snapshots[3])
    assert guard.skipped_updates == 1
    assert trainer.global_step == 2
    failure = dump(tmp_path)["non_finite"]
    assert failure["batch_idx"] == 3
    assert_same_bits(failure["batch"][0], list(data)[3][0])


def test_a_clean_update_after_accumulated_bad_ones_is_made(tmp_path):
    state = State()
    module = Spoilt(losses=(0,))
    fit(tmp_path, module, FiniteUpdates(1), state, accumulate_grad_batches=2)
    assert_same_bits(state.snapshots[2], state.snapshots[0])
    assert not torch.equal(
        state.snapshots[4][0]["inner.0.weight"], state.snapshots[2][0]["inner.0.weight"]
    )


class Two(Spoilt):
    """Steps one optimizer for each end of the network."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for i, optimizer in enumerate(self.optimizers()):
            self.inner.zero_grad()
            loss = PlainModule.training_step(self, batch, batch_idx)
            self.manual_backward(loss * (math.nan if (batch_idx, i) in self.bad_losses else 1))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.inner[i].parameters()) for i in (0, 3)]


def test_in_manual_optimization_the_updates_from_the_bad_one_on_are_skipped(tmp_path):
    state, guard = State(), FiniteUpdates(2)
    fit(tmp_path, Two(losses={(1, 0), (3, 1)}), guard, state)
    assert_same_bits(state.snapshots[2][:3], state.snapshots[1][:3])
    first, second = (state.snapshots[i][0] for i in (3, 4))
    assert not torch.equal(second["inner.0.weight"], first["inner.0.weight"])
    assert torch.equal(second["inner.3.weight"], first["inner.3.weight"])
    assert guard.skipped_updates == 2


def test_in_manual_optimization_the_optimizers_own_gradients_are_named(tmp_path):
    class First(Two):
        def training_step(self, batch, batch_idx):
            for optimizer, layer in zip(self.optimizers(), (0, 3), strict=True):
                self.inner.zero_grad()
                zero = self.inner[layer].bias.sum() * 0
                spoilt = (zero * zero).sqrt() if layer == 0 else 0
                self.manual_backward(PlainModule.training_step(self, batch, batch_idx) + spoilt)
                optimizer.step()

    with pytest.raises(FloatingPointError, match=r"step 0 .*: of inner.0.bias\. /"):
        fit(tmp_path, First(), FiniteUpdates())


class Scales(Callback):
    """The scale at each update, before it is changed."""

    def __init__(self):
        self.scales = []

    def on_before_optimizer_step(self, trainer, *args):
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def fit_scaled(folder, module, guard, *callbacks, init_scale=4.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    fit(folder, module, guard, *callbacks, plugins=plugins)
    return scaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_searches_for_its_scale_undisturbed(tmp_path, fused):
    module = PlainModule(optimizer=lambda p, lr: torch.optim.Adam(p, lr, fused=fused))
    ema, guard = EMA((0.9,)), FiniteUpdates()
    state, scales = State(ema), Scales()
    fit_scaled(tmp_path, module, guard, ema, state, scales, init_scale=2.0**19)
    skipped = [i for i in range(6) if scales.scales[i] > min(scales.scales)]
    assert 1 <= len(skipped) <= 5
    for i in skipped:
        assert_same_bits(state.snapshots[i + 1][::2], state.snapshots[i][::2])  # weights and EMA
    assert next(iter(state.snapshots[-1][2]["steps"].values())) == 6 - len(skipped)
    assert guard.skipped_updates == 0


@pytest.mark.parametrize(("value", "fused"), [(math.inf, False), (math.nan, True)])
def test_under_a_grad_scaler_a_loss_that_is_not_finite_counts(tmp_path, value, fused):
    class Constant(Spoilt):
        """Of a gradient that is finite, so that the scaler has nothing to skip for."""

        def training_step(self, batch, batch_idx):
            loss = PlainModule.training_step(self, batch, batch_idx)
            return loss + (self.value if batch_idx in self.bad_losses else 0)

    module = Constant(
        losses=(1,), value=value, optimizer=lambda p, lr: torch.optim.Adam(p, lr, fused=fused)
    )
    ema, guard = EMA((0.9,)), FiniteUpdates(1)
    state = State(ema)
    fit_scaled(tmp_path, module, guard, ema, state)
    assert guard.skipped_updates == 1
    assert_same_bits(state.snapshots[2][::2], state.snapshots[1][::2])
    assert next(iter(state.snapshots[-1][2]["steps"].values())) == 5


def test_a_gradient_that_no_scale_makes_finite_counts_once_the_scale_is_one(tmp_path):
    module, guard, scales = Spoilt(gradients=range(6)), FiniteUpdates(), Scales()
    message = r"the gradient is not finite at optimizer step 2 .*The loss scale is 0\.5\."
    with pytest.raises(FloatingPointError, match=message):
        fit_scaled(tmp_path, module, guard, scales, init_scale=4.0)
    assert scales.scales == [4.0, 2.0, 1.0]


def test_what_a_later_part_of_a_bad_batch_does_to_buffers_is_restored(tmp_path):
    class Manual(PlainModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            bad = [batch[0] * math.nan] if batch_idx == 2 else batch
            for _ in range(2):  # as the networks of a GAN, which see the same images
                self.optimizers().zero_grad()
                self.manual_backward(self.loss(bad))
                self.optimizers().step()

    module, guard = Manual(), FiniteUpdates(1)
    fit(tmp_path, module, guard)
    assert guard.skipped_updates == 1
    assert all(value.isfinite().all() for value in module.state_dict().values())


class Codes(PlainModule):
    """Of its buffers one is a constant, others change in ways that torch counts and does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.ones(3))
        self.table, self.late = nn.Module(), nn.Module()
        self.table.register_buffer("codes", torch.zeros(2))
        self.late.register_buffer("codes", torch.zeros(2))
        self.late.register_buffer("means", torch.zeros(2))
        self.started = []

    def training_step(self, batch, batch_idx):
        self.started.append({name: buffer.clone() for name, buffer in self.named_buffers()})
        self.table.codes.data += 1
        if batch_idx:
            self.late.codes = self.late.codes + 1
            self.late.means.data += 1
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx in (2, 4) else loss


def test_all_buffers_that_a_bad_batch_changes_are_restored(tmp_path):
    module = Codes()
    make_trainer(tmp_path, FiniteUpdates(2)).fit(module, loader(48))
    for bad in (2, 4):
        assert_same_bits(module.started[bad + 1], module.started[bad])
    assert module.started[5]["table.codes"].tolist() == [3.0, 3.0]
    assert module.started[5]["late.means"].tolist() == [2.0, 2.0]


def test_a_checkpoint_amid_a_batch_whose_update_was_skipped_has_the_weights_before(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    module = tiny_diffusion(network=Overflowing(since=2))
    with pytest.raises(FloatingPointError, match=r"step 2 .*: sample "):
        fit(tmp_path, module, FiniteUpdates(), Save(), data=images(64, 16))
    saved = [torch.load(tmp_path / f"{i}.ckpt", weights_only=True)["state_dict"] for i in (1, 2)]
    assert_same_bits(saved[1], saved[0])


def test_weights_that_the_last_update_ruined_are_logged_as_a_loss_of_nan_and_not_saved(tmp_path):
    logger = MemoryLogger()
    trainer = fit(tmp_path, PlainModule(lr=math.inf), FiniteUpdates(), logger=logger, max_steps=1)
    with pytest.raises(FloatingPointError, match=r"weights of step 1 are not finite, inner\.0"):
        trainer.save_checkpoint(tmp_path / "1.ckpt")
    assert not list(tmp_path.glob("*.ckpt"))
    assert [math.isnan(loss) for _, loss in logger.of("train/loss")] == [True]


# Skipped on the device, and read later


@pytest.fixture
def deferred(monkeypatch):
    """As on CUDA: a fused optimizer of the CPU skips by the same attribute."""
    monkeypatch.setattr(finite_updates, "_DEFERRING_DEVICES", ("cpu", "cuda"))


def fused_adam(params, lr):
    return torch.optim.AdamW(params, lr, fused=True)


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


@pytest.mark.parametrize("every", [1, 2])
def test_flags_are_read_before_a_logging_step_is_logged(tmp_path, deferred, every):
    state = State()
    stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), state, log_every_n_steps=every)
    assert len(state.snapshots) == 1 + 6


def test_flags_are_read_before_a_save(tmp_path, deferred):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (4, 6):
                trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    message, _ = stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), Save())
    assert "at optimizer step 5 " in message
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"4.ckpt", "non-finite-rank0.ckpt"}


@pytest.mark.parametrize("bad", [5, 50])
def test_flags_are_read_before_a_save_after_an_exception(tmp_path, deferred, bad):
    class Dies(Callback):
        def on_train_batch_start(self, trainer, *args):
            1 / (8 - trainer.global_step)

    trainer = make_trainer(tmp_path, Dies(), FiniteUpdates())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Spoilt(losses=(bad,), optimizer=fused_adam), loader(96, 8))
    if bad == 5:
        with pytest.raises(FloatingPointError, match="step 8 is not saved"):
            trainer.save_checkpoint(tmp_path / "8.ckpt")
    else:
        trainer.save_checkpoint(tmp_path / "8.ckpt")
    assert (tmp_path / "8.ckpt").exists() == (bad != 5)


class SpoiltPictures(PicturesModule):
    """Its loss is not finite in batch 5."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 5 else 1)

    def configure_optimizers(self):
        return fused_adam(self.parameters(), lr=1e-2)


def test_flags_are_read_before_a_snapshot_of_averages_and_before_samples(tmp_path, deferred):
    stop(tmp_path, Spoilt(losses=(5,), optimizer=fused_adam), PowerEMA(snapshot_every_n_steps=2))
    snapshots = {path.name for path in (tmp_path / "ema-snapshots").iterdir()}
    assert snapshots == {f"step-{step:09d}.safetensors" for step in (2, 4)}
    grid, options = SampleGrid(2, every_n_steps=2), {"data": pictures(60)}
    stop(tmp_path, SpoiltPictures(), grid, **options)
    grids = {path.name for path in (tmp_path / "samples").glob("step-*")}
    assert grids == {f"step-{step:08d}-raw.png" for step in (2, 4)}


@pytest.mark.parametrize("bad", [11, 23])
def test_flags_are_read_before_the_epoch_and_its_validation_end(tmp_path, deferred, bad):
    class Calls(Callback):
        calls = 0

        def on_validation_batch_start(self, trainer, *args):
            self.calls += not trainer.sanity_checking

    class Val(Spoilt):
        def val_dataloader(self):
            return loader(8)

    module, calls = Val(losses=(bad,), optimizer=fused_adam), Calls()
    options = {"val_check_interval": 12, "check_val_every_n_epoch": None}
    options["limit_val_batches"] = 0 if bad == 23 else 1
    with pytest.raises(FloatingPointError, match=f"optimizer step {bad} "):
        fit(tmp_path, module, FiniteUpdates(), calls, data=loader(192, 8), **options)
    assert calls.calls == 0


def test_of_accumulated_batches_the_bad_one_is_saved_later_too(tmp_path, deferred):
    module, state = Spoilt(losses=(3,), optimizer=fused_adam), State()
    message, _ = stop(tmp_path, module, state, accumulate_grad_batches=2)
    assert "at optimizer step 1 (batch 3, rank 0)" in message
    assert_same_bits(trainable(module), state.snapshots[2][0])
    assert dump(tmp_path)["non_finite"]["batch_idx"] == 3


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_beside_a_grad_scaler_the_device_skips_what_is_not_the_scales_fault(
    tmp_path, deferred, where, unscales
):
    def optimizer(params, lr):  # without the mark, the scaler divides and skips as for any other
        adam = fused_adam(params, lr)
        adam._step_supports_amp_scaling = unscales
        return adam

    module, ema = Spoilt(optimizer=optimizer, **{where: (3, 4, 5, 6, 7)}), EMA((0.9,))
    state, scales = State(ema), Scales()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    message, _ = stop(tmp_path, module, ema, state, scales, plugins=plugins)
    first = 3 if where == "losses" else 5  # after scales of 4 and 2
    assert f"not finite at optimizer step {first} " in message
    assert_same_bits(trainable(module), state.snapshots[3][0])
    assert_same_bits(ema.state_dict()["shadows"], state.snapshots[3][2]["shadows"])
    assert ema.steps == 3


@pytest.mark.parametrize(
    ("options", "guard"),
    [
        ({"optimizer": torch.optim.RMSprop}, FiniteUpdates()),
        ({"optimizer": type("Mine", (torch.optim.AdamW,), {})}, FiniteUpdates()),
        ({"optimizer": torch.optim.AdamW}, FiniteUpdates()),
        ({"optimizer": fused_adam}, FiniteUpdates(1)),
    ],
)
def test_what_the_device_cannot_skip_is_decided_at_once(tmp_path, deferred, options, guard):
    state = State()
    with pytest.raises(FloatingPointError):
        fit(tmp_path, Spoilt(losses=(2, 3), **options), guard, state, log_every_n_steps=50)
    assert len(state.snapshots) == 1 + 3 + guard.max_nonfinite_steps


# What does not go


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        FiniteUpdates(-1)


def test_a_batch_that_cannot_be_stored_does_not_hide_what_happened(tmp_path):
    class Odd(Spoilt):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*batch, object()]

    with pytest.raises(FloatingPointError, match=r"could not be written .*got builtins.object"):
        fit(tmp_path, Odd(losses=(0,)), FiniteUpdates())
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_trial_leaves_no_file(tmp_path):
    with pytest.raises(FloatingPointError, match="step 0"):
        fit(tmp_path, Spoilt(losses=(0,)), FiniteUpdates(), fast_dev_run=True)
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_module_without_optimizers_is_left_alone(tmp_path):
    class None_(PlainModule):
        def configure_optimizers(self):
            return None

    trainer = fit(tmp_path, None_(), FiniteUpdates())
    assert trainer.fit_loop.total_batch_idx + 1 == 6  # all batches


def test_sparse_and_missing_gradients_are_looked_at(tmp_path):
    class Sparse(PlainModule):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            self.unused = nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            factor = math.nan if batch_idx == 1 else 1.0
            rows = self.table(torch.tensor([1, 1]))
            return (rows * torch.tensor(factor).clamp(min=-1)).sum().nan_to_num()

        def configure_optimizers(self):
            return torch.optim.SparseAdam([self.table.weight])

    with pytest.raises(FloatingPointError, match=r"step 1 .*: of table.weight\."):
        fit(tmp_path, Sparse(), FiniteUpdates())


def test_an_optimizer_that_computes_gradients_in_its_step_is_refused(tmp_path):
    module = PlainModule(optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="cannot skip an update of LBFGS"):
        fit(tmp_path, module, FiniteUpdates())


def test_a_buffer_that_grows_and_another_default_dtype_do_not_disturb_the_device(
    tmp_path, deferred
):
    class Growing(Spoilt):
        def __init__(self):
            super().__init__(optimizer=fused_adam)
            self.register_buffer("cache", torch.zeros(2))

        def training_step(self, batch, batch_idx):
            self.cache = torch.zeros(2 + batch_idx)
            return super().training_step(batch, batch_idx)

    module, data = Growing(), loader(32, 8)
    torch.set_default_dtype(torch.float64)
    try:
        fit(tmp_path, module, FiniteUpdates(), data=data)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(module.cache) == 5
