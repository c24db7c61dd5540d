import copy
import math
import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer, trainable
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from torch import nn

from lit_diffusion.callbacks import EMA, FiniteUpdates, MomentumDecay
from lit_diffusion.callbacks.parts.micro_batch import MicroBatch
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
        self.ema, self.seen = ema, []

    def on_train_batch_start(self, trainer, pl_module, *args):
        if not self.seen:
            self._add(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self._add(trainer, pl_module)

    def _add(self, trainer, module):
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        ema = None if self.ema is None else self.ema.state_dict()
        found = (trainable(module), optimizers, ema)
        self.seen.append(copy.deepcopy(found))


def fit(folder, module, guard, *callbacks, data=None, **options):
    options = {"plugins": [AtomicCheckpointIO()], **options}
    trainer = make_trainer(folder, *callbacks, guard, **options)
    trainer.fit(module, data or loader(48, 8))
    return trainer


def dump(folder, rank=0):
    return torch.load(folder / f"non-finite-rank{rank}.ckpt", weights_only=True)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_an_update_that_is_not_finite_is_left_out_whole(tmp_path, where, optimizer):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    module = Spoilt(optimizer=lambda p, lr: optimizer(p, lr=lr, **options), **{where: (1, 3)})
    ema = EMA((0.9,))
    state, guard = State(ema), FiniteUpdates(max_nonfinite_steps=2)
    trainer = fit(tmp_path, module, guard, ema, state)
    for batch in range(6):
        before, after = state.seen[batch], state.seen[batch + 1]
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
            r"(.*non-finite-rank0.ckpt) holds the batch .* Its update was left out "
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
    assert_same_bits(state.seen[-1], state.seen[-2])
    assert len(state.seen) == 4
    assert [(step, math.isnan(loss)) for step, loss in logger.of("train/loss")] == [(2, True)]


def test_a_run_goes_on_until_more_are_left_out_than_may_be(tmp_path, caplog):
    logger, guard = MemoryLogger(), FiniteUpdates(max_nonfinite_steps=2)
    caplog.set_level("INFO")
    with pytest.raises(FloatingPointError, match=r"step 5 .*\(3 of at most 2"):
        fit(tmp_path, Spoilt(losses=(1,), gradients=(3, 5)), guard, logger=logger)
    told = [text for text in caplog.messages if "Left out" in text]
    assert [re.search(r"\((\d of .*?)\).*step (\d)", t).groups() for t in told] == [
        ("1 of at most 2", "1"),
        ("2 of at most 2", "3"),
    ]
    assert all("\n" not in text for text in told)
    assert logger.of("train/nonfinite_steps") == [(1, 1.0), (3, 2.0), (5, 3.0)]
    assert dump(tmp_path)["global_step"] == 5


def test_what_was_left_out_counts_on_after_a_resume(tmp_path):
    guard = FiniteUpdates(max_nonfinite_steps=1)
    trainer = fit(tmp_path, Spoilt(losses=(1,)), guard)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["FiniteUpdates"] == {
        "skipped_updates": 1
    }
    again = make_trainer(tmp_path, FiniteUpdates(1), max_epochs=2, plugins=[AtomicCheckpointIO()])
    with pytest.raises(FloatingPointError, match="2 of at most 1"):
        again.fit(Spoilt(losses=(1,)), loader(48, 8), ckpt_path=tmp_path / "end.ckpt")


def test_a_run_without_any_saves_what_it_saved_without_the_callback():
    assert FiniteUpdates().state_dict() == {}


def test_training_is_the_same_to_the_last_bit_with_it(tmp_path):
    ends = []
    for guards in ([], [FiniteUpdates()], [FiniteUpdates(3)]):
        torch.manual_seed(1)
        module = PlainModule()
        make_trainer(tmp_path, *guards, gradient_clip_val=0.1).fit(module, loader())
        ends.append(trainable(module))
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])


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
    with pytest.raises(FloatingPointError) as told:
        fit(tmp_path, module, FiniteUpdates(), data=images(64, 16), log_every_n_steps=1)
    sample, index, u, quartile, t = re.search(
        r"step 2 \(batch 2, rank 0\): sample (\d+) \(data index (\d+)\) at u = ([\d.]+) "
        r"\(train/loss_q(\d)\), t = (\d+);",
        str(told.value),
    ).groups()
    assert int(index) == 32 + int(sample)
    assert (int(quartile), int(t) >= 75) == (int(float(u) * 4), True)
    kept = dump(tmp_path)["replay"]["outputs"]
    bad = ~kept["per_sample_loss"].isfinite()
    assert torch.equal(bad, kept["t"] >= 75)
    assert f"and {int(bad.sum()) - 3} more" in str(told.value)


# Accumulation, manual optimization, GradScaler


@pytest.mark.parametrize("where", ["losses", "gradients"])
def test_of_accumulated_batches_none_counts_and_the_bad_one_is_dumped(tmp_path, where):
    state, guard = State(), FiniteUpdates(1)
    module = Spoilt(**{where: (3,)})
    data = loader(48, 8)
    trainer = fit(tmp_path, module, guard, state, data=data, accumulate_grad_batches=3)
    assert_same_bits(state.seen[6], state.seen[3])
    assert guard.skipped_updates == 1
    assert trainer.global_step == 2
    kept = dump(tmp_path)
    assert kept["replay"]["batch_idx"] == 3
    assert_same_bits(kept["replay"]["batch"][0], list(data)[3][0])


def test_a_clean_update_after_accumulated_bad_ones_is_made(tmp_path):
    state = State()
    module = Spoilt(losses=(0,))
    fit(tmp_path, module, FiniteUpdates(1), state, accumulate_grad_batches=2)
    assert_same_bits(state.seen[2], state.seen[0])
    assert not torch.equal(state.seen[4][0]["inner.0.weight"], state.seen[2][0]["inner.0.weight"])


class Two(Spoilt):
    """Steps one optimizer for each end of the network."""

    def __init__(self, *args, raw=False, **options):
        super().__init__(*args, **options)
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch, batch_idx):
        for i, optimizer in enumerate(self.optimizers(use_pl_optimizer=not self.raw)):
            self.inner.zero_grad()
            loss = PlainModule.training_step(self, batch, batch_idx)
            self.manual_backward(loss * (math.nan if (batch_idx, i) in self.bad_losses else 1))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.inner[i].parameters()) for i in (0, 3)]


def test_in_manual_optimization_the_updates_from_the_bad_one_on_are_left_out(tmp_path):
    state, guard = State(), FiniteUpdates(2)
    fit(tmp_path, Two(losses={(1, 0), (3, 1)}), guard, state)
    assert_same_bits(state.seen[2], state.seen[1])
    first, second = (state.seen[i][0] for i in (3, 4))
    assert not torch.equal(second["inner.0.weight"], first["inner.0.weight"])
    assert torch.equal(second["inner.3.weight"], first["inner.3.weight"])
    assert guard.skipped_updates == 2
    assert dump(tmp_path)["replay"]["updates"] == 1


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
        self.seen = []

    def on_before_optimizer_step(self, trainer, *args):
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


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
    skipped = [i for i in range(6) if scales.seen[i] > min(scales.seen)]
    assert 1 <= len(skipped) <= 5
    for i in skipped:
        assert_same_bits(state.seen[i + 1][::2], state.seen[i][::2])  # weights and EMA
    assert next(iter(state.seen[-1][2]["steps"].values())) == 6 - len(skipped)
    assert guard.skipped_updates == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
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
    assert_same_bits(state.seen[2][::2], state.seen[1][::2])
    assert next(iter(state.seen[-1][2]["steps"].values())) == 5


def test_a_gradient_that_no_scale_makes_finite_counts_once_the_scale_is_one(tmp_path):
    module, guard, scales = Spoilt(gradients=range(6)), FiniteUpdates(), Scales()
    message = r"the gradient is not finite at optimizer step 2 .*The loss scale is now 0\.5\."
    with pytest.raises(FloatingPointError, match=message):
        fit_scaled(tmp_path, module, guard, scales, init_scale=4.0)
    assert scales.seen == [4.0, 2.0, 1.0]
    assert dump(tmp_path)["replay"]["precision_state"]["scale"] == 0.5


def test_it_goes_with_decayed_momentum(tmp_path):
    state, guard = State(), FiniteUpdates(1)
    fit(tmp_path, Spoilt(losses=(2,)), guard, MomentumDecay(6), state)
    assert_same_bits(state.seen[3], state.seen[2])
    assert state.seen[-1][1][0]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_running_averages_of_a_bad_batch_are_left_out_too(tmp_path):
    """BatchNorm would keep the NaN for good, and save it."""

    class NaNInput(PlainModule):
        def training_step(self, batch, batch_idx):
            bad = [batch[0] * math.nan] if self.global_step == 2 else batch
            return super().training_step(bad, batch_idx)

    module = NaNInput()
    fit(tmp_path, module, FiniteUpdates(1))
    buffers = dict(module.named_buffers())
    assert buffers
    assert all(value.isfinite().all() for value in buffers.values())


def test_what_a_later_part_of_a_bad_batch_does_to_buffers_is_put_back_too(tmp_path):
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


def test_all_buffers_that_batches_change_are_put_back_and_no_others_copied(tmp_path):
    copied = []

    class Look(Callback):
        def on_before_backward(self, *args):
            copied.append({*guard._now.buffers})

    module, guard = Codes(), FiniteUpdates(2)
    make_trainer(tmp_path, guard, Look()).fit(module, loader(48))
    for bad in (2, 4):
        assert_same_bits(module.started[bad + 1], module.started[bad])
    changing = {"table.codes", "late.codes", "late.means"}
    assert {*module.started[0]} - copied[2] == {"constant"}
    assert changing <= copied[2] == copied[5]


def test_a_checkpoint_amid_a_batch_whose_update_was_left_out_has_the_weights_before(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    module = tiny_diffusion(network=Overflowing(since=2))
    with pytest.raises(FloatingPointError, match=r"step 2 .*: sample "):
        fit(tmp_path, module, FiniteUpdates(), Save(), data=images(64, 16))
    saved = [torch.load(tmp_path / f"{i}.ckpt", weights_only=True)["state_dict"] for i in (1, 2)]
    assert_same_bits(saved[1], saved[0])


# What does not go


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        FiniteUpdates(-1)


def test_a_batch_that_cannot_be_stored_does_not_hide_what_happened(tmp_path):
    class Odd(Spoilt):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*batch, object()]

    with pytest.raises(FloatingPointError, match=r"could not be kept .*got builtins.object. Its"):
        fit(tmp_path, Odd(losses=(0,)), FiniteUpdates())
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_trial_leaves_no_file(tmp_path):
    with pytest.raises(FloatingPointError, match="step 0"):
        fit(tmp_path, Spoilt(losses=(0,)), FiniteUpdates(), fast_dev_run=True)
    assert not list(tmp_path.glob("*.ckpt"))


def test_batches_and_optimizers_are_let_go_of(tmp_path):
    guard = FiniteUpdates(1)
    fit(tmp_path, Spoilt(losses=(5,)), guard)
    assert (guard._window, guard._failed, guard._now) == ([], [], None)
    assert guard.skipped_updates == 1


def test_ranks_with_a_loss_come_before_those_with_a_gradient():
    def seen(loss, gradient):
        batch = MicroBatch(0, 0, 0, 0, None, {}, {})
        batch.loss_is_bad = torch.tensor(loss)
        batch.gradients = torch.tensor([False, gradient]), []
        return batch

    clean, gradient, loss = seen(False, False), seen(False, True), seen(True, True)
    assert [batch.badness() for batch in (clean, gradient, loss)] == [0, 1, 2]


def test_a_module_without_optimizers_is_left_alone(tmp_path):
    class None_(PlainModule):
        def configure_optimizers(self):
            return None

    fit(tmp_path, None_(), FiniteUpdates())


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
    with pytest.raises(ValueError, match="cannot leave out an update of LBFGS"):
        fit(tmp_path, module, FiniteUpdates())
