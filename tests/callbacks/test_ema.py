import copy
import logging
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from support.memory_logger import MemoryLogger
from support.plain_module import (
    PlainModule,
    Watch,
    assert_close,
    assert_same_bits,
    loader,
    make_trainer,
    trainable,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lit_diffusion import load
from lit_diffusion.callbacks import EMA, FiniteUpdates, MomentumDecay, StepSeed
from lit_diffusion.callbacks.ema import check_averages, ema_update_, span_decay, warmup_decay
from lit_diffusion.protocols import WeightsProvider

DECAY = 0.9

# The pure functions


def test_the_average_of_a_constant_is_exactly_the_constant():
    constant = [torch.randn(1000), torch.randn(3, 3) * 1e4]
    shadow = [tensor.clone() for tensor in constant]
    for n in range(2000):
        ema_update_(shadow, constant, warmup_decay(0.9999, n))
    assert all(torch.equal(s, c) for s, c in zip(shadow, constant, strict=True))


def test_the_average_of_bfloat16_weights_follows_a_float64_reference():
    decay, generator = 0.999, torch.Generator().manual_seed(0)
    shadow = [torch.ones(64)]
    reference = torch.ones(64, dtype=torch.float64)
    for n in range(1000):
        param = (1 + 0.1 * torch.randn(64, generator=generator)).bfloat16()
        d = warmup_decay(decay, n)
        ema_update_(shadow, [param], d)
        reference = d * reference + (1 - d) * param.double()
    torch.testing.assert_close(shadow[0].double(), reference, rtol=1e-5, atol=0)


@pytest.mark.parametrize("warmup", [True, False])
def test_one_update_for_k_steps_equals_k_updates_on_weights_that_stand_still(warmup):
    for first in (0, 7, 5000):
        weights = [torch.randn(100)]
        one_by_one, at_once = [torch.zeros(100)], [torch.zeros(100)]
        for n in range(first, first + 10):
            ema_update_(one_by_one, weights, warmup_decay(0.999, n) if warmup else 0.999)
        ema_update_(at_once, weights, span_decay(0.999, first, first + 10, warmup))
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_skipped", [None, 0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9])
def test_an_update_goes_by_index_where_strides_differ(decay, is_skipped):
    before, weights = torch.randn(2, 4, 3, 2, 2)
    found_inf = None if is_skipped is None else torch.tensor(is_skipped)
    shadow = [before.clone()]
    ema_update_(shadow, [weights.to(memory_format=torch.channels_last)], decay, found_inf)
    expected = before if is_skipped else torch.lerp(before, weights, 1 - decay)
    assert torch.equal(shadow[0], expected)


def test_decay_0_copies_the_weights_exactly_where_the_device_may_skip():
    weights = [torch.randn(100)]
    shadow = [torch.full((100,), 1e8)]
    ema_update_(shadow, weights, 0.0, torch.zeros(()))
    assert torch.equal(shadow[0], weights[0])


# The state in a checkpoint

SOUND = {
    "decays": [0.9, 0.5],
    "steps": {"a": 3, "b": 0},
    "shadows": [{"a": torch.zeros(2), "b": torch.zeros(1)} for _ in range(2)],
}
EDITS = {
    "decays must be": [
        lambda s: s.update(decays=[float("nan"), 0.5]),
        lambda s: s.update(decays=[]),
    ],
    "steps must be": [
        lambda s: s["steps"].update(a=-10),
        lambda s: s.update(steps=[3, 0]),
    ],
    "average of each parameter": [
        lambda s: s["steps"].update(c=3),
        lambda s: s["shadows"][1].pop("a"),
    ],
    "differ in shape": [lambda s: s["shadows"][1].update(a=torch.zeros(3))],
    "of real numbers": [
        lambda s: s["shadows"][1].update(a=torch.zeros(2, dtype=torch.int64)),
        lambda s: s["shadows"][0].update(a=torch.zeros(2).to_sparse()),
    ],
    "for each decay": [lambda s: s["shadows"].pop(), lambda s: s.update(shadows=None)],
    "snapshots must be hashes": [
        lambda s: s.update(snapshots={"a": "b"}),
        lambda s: s.update(snapshots={4: 5}),
    ],
    "must hold decays, steps": [lambda s: s.pop("steps"), lambda s: s.pop("decays")],
}


@pytest.mark.parametrize(("reason", "edit"), [(r, e) for r, edits in EDITS.items() for e in edits])
def test_a_state_that_no_ema_saves_is_refused(reason, edit):
    state = copy.deepcopy(SOUND)
    check_averages(state)
    check_averages({})
    edit(state)
    with pytest.raises(ValueError, match=reason):
        check_averages(state)
    with pytest.raises(ValueError, match="must hold decays"):
        check_averages([state])


# The callback


def shadows(ema, which=0):
    return ema.state_dict()["shadows"][which]


def fit(folder, module, *callbacks, batches=None, ckpt_path=None, **options):
    trainer = make_trainer(folder, *callbacks, **options)
    batches = batches or loader()
    trainer.fit(module, batches, batches, ckpt_path=ckpt_path)
    return trainer


class Spy(Callback):
    """The trainable weights in each batch of an evaluation."""

    def __init__(self):
        self.weights = []

    def on_validation_batch_start(self, trainer, pl_module, *args):
        self.weights.append(trainable(pl_module))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


# What is averaged, and when


@pytest.mark.parametrize(("warmup", "accumulate"), [(True, 3), (False, 1)])
def test_the_averages_equal_a_float64_reference_after_every_accumulated_step(
    tmp_path, accumulate, warmup
):
    ema, watch = EMA((DECAY, 0.99), warmup=warmup), Watch()
    fit(tmp_path, PlainModule(), ema, watch, max_epochs=3, accumulate_grad_batches=accumulate)
    assert len(watch.history) - 1 == 3 * -(-4 // accumulate)
    assert_close(shadows(ema, 0), watch.average(DECAY, warmup))
    assert_close(shadows(ema, 1), watch.average(0.99, warmup))


def test_frozen_parameters_and_buffers_are_not_averaged_and_shared_ones_are_averaged_once(tmp_path):
    ema, module = EMA(), PlainModule()
    fit(tmp_path, module, ema)
    assert set(shadows(ema)) == {n for n, p in module.named_parameters() if p.requires_grad}
    assert not any("frozen" in name or "running" in name for name in shadows(ema))
    assert "inner.3.weight" in shadows(ema)
    assert "shared.weight" not in shadows(ema)


# Buffers, and averages on the CPU


class Buffers(Callback):
    """The module's buffers after each optimizer step, and those in validations."""

    def __init__(self):
        self.after_steps, self.validated = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.after_steps.append({n: b.clone() for n, b in pl_module.named_buffers()})

    def on_validation_batch_start(self, trainer, pl_module, *args):
        self.validated.append({n: b.clone() for n, b in pl_module.named_buffers()})


RUNNING = {"inner.1.running_mean", "inner.1.running_var"}


@pytest.mark.parametrize("start", [0, 3])
def test_buffers_are_averaged_with_the_weights_where_that_is_asked(tmp_path, start):
    ema, watch, buffers = EMA((DECAY,), buffers=True, start=start), Watch(), Buffers()
    module = PlainModule()
    module.register_buffer("unsaved", torch.ones(2), persistent=False)
    fit(tmp_path, module, ema, watch, buffers, max_epochs=2, num_sanity_val_steps=0)
    averages = shadows(ema)
    assert averages.keys() == {n for n, p in module.named_parameters() if p.requires_grad} | RUNNING
    for name in RUNNING:
        initial = dict(PlainModule().named_buffers())
        history = [step[name].double() for step in [initial, *buffers.after_steps]]
        average = history[start]
        for n, value in enumerate(history[start + 1 :]):
            d = min(DECAY, (1 + n) / (10 + n))
            average = d * average + (1 - d) * value
        torch.testing.assert_close(averages[name].double(), average, rtol=0, atol=1e-6)
        assert torch.equal(buffers.validated[-1][name], averages[name])
        assert torch.equal(module.state_dict()[name], buffers.after_steps[-1][name])
    plain, live = PlainModule(), Buffers()
    fit(tmp_path, plain, EMA((DECAY,)), live, max_epochs=2, num_sanity_val_steps=0)
    assert_same_bits(plain.state_dict(), module.state_dict())
    assert_same_bits(live.validated[-1], live.after_steps[-1])  # without `buffers=True`


def test_averaged_buffers_go_on_at_a_resume_and_are_loaded(tmp_path):
    whole, first, again = (EMA((DECAY,), buffers=True) for _ in range(3))
    fit(tmp_path, PlainModule(), whole, StepSeed(1), max_epochs=2)
    trainer = fit(tmp_path, PlainModule(), first, StepSeed(1))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = {"ckpt_path": tmp_path / "half.ckpt", "max_epochs": 2}
    fit(tmp_path, PlainModule(), again, StepSeed(1), **resumed)
    assert_same_bits(again.state_dict(), whole.state_dict())
    module = load(tmp_path / "half.ckpt", module=PlainModule())
    for name, average in shadows(first).items():
        assert torch.equal(module.state_dict()[name], average)
    assert torch.equal(module.shared.weight, shadows(first)["inner.3.weight"])


class Replaces(PlainModule):
    """Has a running mean that is another tensor after each batch, and a mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def training_step(self, batch, batch_idx):
        self.mean = 0.5 * self.mean + batch[0].mean(0)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_a_module_replaces_is_averaged_on_and_a_mask_never(tmp_path):
    module, ema, buffers = Replaces(), EMA((DECAY,), warmup=False, buffers=True), Buffers()
    fit(tmp_path, module, ema, buffers)
    average = torch.zeros(4, dtype=torch.float64)
    for step in buffers.after_steps:
        average = DECAY * average + (1 - DECAY) * step["mean"]
    torch.testing.assert_close(shadows(ema)["mean"].double(), average, rtol=0, atol=1e-6)
    assert "mask" not in shadows(ema)
    module.double()  # gives it other buffers, and the same parameters
    with ema.weights("ema"):
        torch.testing.assert_close(module.mean, average, rtol=0, atol=1e-6)
    assert torch.equal(module.mean, buffers.after_steps[-1]["mean"].double())


def test_the_vectors_of_spectral_norm_stay_those_of_the_weights(tmp_path):
    """Averaged, they are shorter than 1, and the norm that divides the weight is too small."""
    module = PlainModule()
    nn.utils.parametrizations.spectral_norm(module.inner[0])
    nn.utils.spectral_norm(module.inner[3])
    ema = EMA((DECAY,), buffers=True)
    fit(tmp_path, module, ema, Buffers(), max_epochs=2)
    assert shadows(ema).keys() > RUNNING
    assert not any(name.endswith(("_u", "_v")) for name in shadows(ema))
    module.eval()
    with ema.weights("ema"):
        for layer in (module.inner[0], module.inner[3]):
            layer(torch.zeros(1, layer.in_features))  # which computes the weight of the hook
            largest = torch.linalg.matrix_norm(layer.weight, 2)
            assert largest.item() == pytest.approx(1, abs=0.1)


def test_buffers_are_averaged_from_when_a_parameter_is_trained(tmp_path):
    class Unfreezes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.inner.requires_grad_(batch_idx >= 2)

    class Waits(PlainModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * self.extra.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, ema = Waits(), EMA((DECAY,), prefix="inner", buffers=True)
    module.extra = nn.Parameter(torch.zeros(1))
    module.inner.requires_grad_(False)
    with pytest.warns(UserWarning, match="No optimizer holds .*prefix='inner'.* until one does"):
        fit(tmp_path, module, ema, Unfreezes())
    assert shadows(ema).keys() > RUNNING


def test_a_resume_may_drop_or_begin_averages_of_buffers(tmp_path):
    plain = {"max_epochs": 2}
    fit(tmp_path, PlainModule(), whole := EMA((DECAY,)), StepSeed(1), **plain)
    for buffers in (True, False):
        first, again = EMA((DECAY,), buffers=buffers), EMA((DECAY,), buffers=not buffers)
        fit(tmp_path, PlainModule(), first, StepSeed(1)).save_checkpoint(tmp_path / "half.ckpt")
        resumed = plain | {"ckpt_path": tmp_path / "half.ckpt"}
        fit(tmp_path, PlainModule(), again, StepSeed(1), **resumed)
        weights = {n: v for n, v in shadows(again).items() if n not in RUNNING}
        assert_same_bits(weights, shadows(whole))
        assert (shadows(again).keys() > RUNNING) != buffers


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_averages_on_the_cpu_are_the_same(tmp_path, accelerator):
    averages, validated = [], []
    for on_cpu in (False, True):
        ema, spy = EMA((DECAY,), on_cpu=on_cpu, buffers=True), Spy()
        fit(tmp_path, PlainModule(), ema, spy, StepSeed(1), max_epochs=2, accelerator=accelerator)
        averages.append({name: value.cpu() for name, value in shadows(ema).items()})
        validated.append([{n: v.cpu() for n, v in weights.items()} for weights in spy.weights])
    assert {value.device.type for value in shadows(ema).values()} == {"cpu"}
    assert_close(*averages, atol=1e-7)
    for weights, others in zip(*validated, strict=True):
        assert_close(weights, others, atol=1e-7)


@pytest.mark.parametrize(
    ("precision", "wide"), [("bf16-true", torch.float32), ("64-true", torch.float64)]
)
def test_averages_are_float32_or_wider(tmp_path, precision, wide):
    fit(tmp_path, PlainModule(), ema := EMA((0.9, 0.99)), precision=precision)
    assert {v.dtype for which in (0, 1) for v in shadows(ema, which).values()} == {wide}


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_move_the_average(tmp_path, fused):
    class Overflows(PlainModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if batch_idx in (0, 2) else loss

    counts, averages = [], []

    class Count(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            counts.append(set(ema.state_dict()["steps"].values()))
            averages.append(copy.deepcopy(shadows(ema)))

    ema = EMA((DECAY,))
    module = Overflows(optimizer=lambda params, lr: torch.optim.Adam(params, lr, fused=fused))
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(tmp_path, module, ema, Count(), plugins=[scaler])
    assert counts == [{0}, {1}, {1}, {2}]
    assert_same_bits(averages[2], averages[1])


class Two(PlainModule):
    """Trains as a GAN does, the critic twice as often; remembers what its steps gave."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(4, 1)
        self.steps = {"inner": [], "critic": []}

    def training_step(self, batch, batch_idx):
        fast, slow = self.optimizers()
        for name, optimizer, every in (("critic", fast, 1), ("inner", slow, 2)):
            if batch_idx % every == 0:
                optimizer.zero_grad()
                out = self.critic(self.inner(batch[0])).mean()
                self.manual_backward(out if name == "inner" else -out + out.pow(2))
                optimizer.step()
                self.steps[name].append(trainable(self))

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.critic.parameters(), 0.1),
            torch.optim.SGD(self.inner.parameters(), 0.1),
        )


@pytest.mark.parametrize("prefix", ["", "inner"])
def test_with_two_optimizers_each_network_is_averaged_when_its_own_optimizer_steps(
    tmp_path, prefix
):
    """Also where one of them holds nothing that is averaged."""
    module, ema = Two(), EMA((DECAY,), prefix=prefix)
    start = trainable(module)
    fit(tmp_path, module, ema)
    assert (len(module.steps["critic"]), len(module.steps["inner"])) == (4, 2)
    watch = Watch()
    assert {name.split(".")[0] for name in shadows(ema)} == (
        {prefix} if prefix else {*module.steps}
    )
    for name, history in module.steps.items():
        watch.history = [start, *history]
        mine = {k: v for k, v in shadows(ema).items() if k.startswith(name)}
        assert_close(mine, {k: v for k, v in watch.average(DECAY).items() if k in mine})


class SecondEpoch(Watch):
    """Of the second epoch alone."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            super().on_train_batch_start(trainer, *args)

    def on_train_batch_end(self, trainer, *args):
        if trainer.current_epoch == 1:
            super().on_train_batch_end(trainer, *args)


def test_parameters_unfrozen_or_added_later_are_averaged_from_then_on(tmp_path):
    class Grows(PlainModule):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.frozen.requires_grad_(True)
                self.extra = nn.Parameter(torch.ones(4))
                self.optimizers().add_param_group(
                    {"params": [*self.frozen.parameters(), self.extra]}
                )

        def loss(self, batch):
            return super().loss(batch) + getattr(self, "extra", torch.zeros(1)).pow(2).sum()

    ema, watch = EMA((DECAY,), warmup=False), SecondEpoch()
    fit(tmp_path, Grows(), ema, watch, max_epochs=2)
    late = {
        k: v for k, v in watch.average(DECAY, warmup=False).items() if k[:5] in ("froze", "extra")
    }
    assert len(late) == 3
    assert_close({k: shadows(ema)[k] for k in late}, late)


def test_a_parameter_that_takes_the_place_of_another_is_averaged_anew(tmp_path):
    class NewHead(PlainModule):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.inner[3] = self.shared = nn.Linear(8, 4, bias=False)
                self.optimizers().add_param_group({"params": self.inner[3].parameters()})

    ema, watch, module = EMA((DECAY,), warmup=False), SecondEpoch(), NewHead()
    fit(tmp_path, module, ema, watch, max_epochs=2)
    expected = watch.average(DECAY, warmup=False)["inner.3.weight"]
    torch.testing.assert_close(shadows(ema)["inner.3.weight"].double(), expected)
    with ema.weights("ema"):
        assert torch.equal(module.inner[3].weight, shadows(ema)["inner.3.weight"])


def test_averages_are_in_the_order_of_the_module(tmp_path):
    module, ema = PlainModule(), EMA((DECAY,), buffers=True)
    buffers = [f"buffer_{i}" for i in range(6)]
    for name in buffers:
        module.register_buffer(name, torch.ones(1))
    fit(tmp_path, module, ema)
    assert [name for name in shadows(ema) if name in buffers] == buffers


@pytest.mark.slow
def test_compiled_modules_are_averaged_under_the_names_of_uncompiled_ones(tmp_path):
    def compiled():
        module = PlainModule()
        module.inner = torch.compile(module.inner, backend="eager")
        module.shared = nn.Identity()
        return module

    fit(tmp_path, PlainModule(), plain := EMA((DECAY,)), StepSeed(1))
    ema, spy = EMA((DECAY,), prefix="inner"), Spy()
    trainer = fit(tmp_path, compiled(), ema, spy, StepSeed(1), num_sanity_val_steps=0)
    assert_same_bits(shadows(ema), shadows(plain))
    weights = {name.replace("_orig_mod.", ""): v for name, v in spy.weights[0].items()}
    assert_close(weights, shadows(ema), 0)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    again = EMA((DECAY,), prefix="inner")
    fit(tmp_path, compiled(), again, ckpt_path=tmp_path / "c.ckpt", max_epochs=1)
    assert_same_bits(shadows(again), shadows(ema))


@pytest.mark.parametrize(("start", "every_n_steps"), [(3, 1), (3, 3), (20, 1)])
def test_until_the_start_the_averages_are_the_weights(tmp_path, start, every_n_steps):
    ema, watch = EMA((DECAY,), every_n_steps=every_n_steps, start=start), Watch()
    fit(tmp_path, PlainModule(), ema, watch, max_epochs=2)  # 8 steps
    history = watch.history[: 1 + 8 - 8 % every_n_steps]
    watch.history = history[start:] or history[-1:]
    if every_n_steps == 1:
        assert_close(shadows(ema), watch.average(DECAY))
    else:  # once, by the decays of its three steps
        d = 0.1 * (2 / 11) * (3 / 12)
        first, last = watch.history[0], watch.history[3]
        assert_close(shadows(ema), {k: d * first[k] + (1 - d) * v for k, v in last.items()})


def test_prefix_names_a_whole_submodule(tmp_path):
    ema = EMA(prefix="inner.0.")
    fit(tmp_path, PlainModule(), ema)
    assert set(shadows(ema)) == {"inner.0.weight", "inner.0.bias"}
    with pytest.raises(ValueError, match=r"'inn'.*'frozen', 'inner'"):
        fit(tmp_path, PlainModule(), EMA(prefix="inn"))


# Which weights an evaluation uses


def test_before_the_first_update_evaluations_see_the_raw_weights(tmp_path):
    class LoadsLate(PlainModule):
        def on_train_start(self):
            with torch.no_grad():
                for param in self.parameters():
                    param.add_(1)

    spy, ema, watch = Spy(), EMA((DECAY,), every_n_steps=3), Watch()
    module = LoadsLate()
    start = trainable(module)
    fit(
        tmp_path, module, ema, spy, watch, max_steps=4, val_check_interval=1, num_sanity_val_steps=1
    )
    per_validation = spy.weights[1::4]
    assert_same_bits(spy.weights[0], start)  # the sanity check
    for weights, raw in zip(per_validation[:2], watch.history[1:], strict=False):
        assert_same_bits(weights, raw)
    assert_close(per_validation[2], dict(shadows(ema)) | {}, 0)
    first = {k: v + 1 for k, v in start.items()}
    assert_close(watch.history[0], first)
    watch_decay = 1 / 10 * 2 / 11 * 3 / 12
    expected = {
        k: watch_decay * first[k] + (1 - watch_decay) * v for k, v in watch.history[3].items()
    }
    assert_close(shadows(ema), expected)  # not from the weights before they were loaded


def test_evaluations_use_the_average_and_leave_raw_weights_and_average_as_they_were(tmp_path):
    spy, ema, module = Spy(), EMA((DECAY, 0.5)), PlainModule()
    trainer = fit(tmp_path, module, ema, spy, precision="bf16-true")
    raw, average = copy.deepcopy(module.state_dict()), copy.deepcopy(ema.state_dict())
    assert not torch.equal(raw["inner.0.weight"].float(), average["shadows"][0]["inner.0.weight"])
    spy.weights.clear()
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, loader())
        assert_same_bits(dict(module.state_dict()), dict(raw))
        assert_same_bits(ema.state_dict(), average)
    in_dtype = {k: v.to(module.dtype).double() for k, v in average["shadows"][0].items()}
    assert len(spy.weights) == 3 * 4
    for weights in spy.weights:
        assert_same_bits(weights, in_dtype)


def test_weights_gives_any_decay_nested_and_after_exceptions(tmp_path):
    ema, module, spy = EMA((DECAY, 0.5), warmup=False), PlainModule(), Spy()
    trainer = fit(tmp_path, module, ema, spy)
    raw, first, second = trainable(module), shadows(ema, 0), shadows(ema, 1)
    assert isinstance(ema, WeightsProvider)
    assert ema.names() == ["raw", "ema", "ema_0.9", "ema_0.5"]
    with ema.weights("ema"):
        assert_close(trainable(module), first, 0)
        with ema.weights("ema_0.5"):
            trainer.validate(module, loader())
            assert_close(spy.weights[-1], second, 0)
            assert_close(trainable(module), second, 0)
            with ema.weights("raw"):
                assert_same_bits(trainable(module), raw)
            assert_close(trainable(module), second, 0)
        with pytest.raises(KeyError), ema.weights("ema_0.9"):
            raise KeyError
        assert_close(trainable(module), first, 0)
    assert_same_bits(trainable(module), raw)
    with pytest.raises(ValueError, match=r"EMA knows the weights .*'best'"), ema.weights("best"):
        pass
    with pytest.raises(RuntimeError, match="no averages"), EMA().weights("ema"):
        pass


def test_training_or_loading_under_averaged_weights_is_refused(tmp_path):
    ema, module = EMA((DECAY,)), PlainModule()
    trainer = fit(tmp_path, module, ema)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    with ema.weights("ema"), pytest.raises(RuntimeError, match="leave EMA"):
        fit(tmp_path, module, ema)
    with ema.weights("ema"), pytest.raises(RuntimeError, match="leave EMA"):
        trainer.validate(module, loader(), ckpt_path=tmp_path / "c.ckpt")

    class StepsInside(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            with ema.weights("ema"):
                trainer.optimizers[0].step()

    raw = trainable(module)
    with pytest.raises(RuntimeError, match="would be lost"):
        fit(tmp_path, module, ema, StepsInside())
    assert not torch.equal(trainable(module)["inner.0.weight"], raw["inner.0.weight"])


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_interruption_in_the_middle_of_a_swap_is_repaired(tmp_path, monkeypatch, way):
    ema, module = EMA((DECAY,)), PlainModule()
    trainer = fit(tmp_path, module, ema)
    raw = trainable(module)

    def half(targets, sources):
        targets[0].copy_(sources[0])
        monkeypatch.undo()
        raise KeyboardInterrupt

    context = ema.weights("ema")
    if way == "out":
        context.__enter__()
    monkeypatch.setattr(torch, "_foreach_copy_", half)
    with pytest.raises(KeyboardInterrupt):
        context.__enter__() if way == "in" else context.__exit__(None, None, None)
    ema.on_exception(trainer, module, KeyboardInterrupt())
    assert_same_bits(trainable(module), raw)


# Checkpoints


class SaveEverywhere(Callback):
    """Saves in every hook, full and weights-only, with what the files should hold."""

    def __init__(self, folder, watch, tag):
        self.folder, self.watch, self.tag, self.saved = folder, watch, tag, []
        batch = "train_batch_start", "validation_batch_end"
        epoch = "validation_epoch_end", "train_epoch_end"
        for hook in (*batch, *epoch, "validation_start", "validation_end", "exception"):
            setattr(self, f"on_{hook}", partial(self.save, hook))

    def save(self, hook, trainer, *_):
        path = self.folder / f"{self.tag}-{hook}-{len(self.saved)}"
        raw = self.watch.history[-1] if self.watch.history else None
        trainer.save_checkpoint(f"{path}.full")
        trainer.save_checkpoint(f"{path}.weights", weights_only=True)
        self.saved.append((path, raw, self.watch.average(DECAY) if raw else None))


class SavesAndFails(PlainModule):
    def __init__(self, save=None, fail_at=None):
        super().__init__()
        self.save, self.fail_at = save, fail_at

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.save:
            self.save("validation_step", self.trainer)
        if self.fail_at == self.current_epoch:
            raise ArithmeticError("in validation")


def test_a_checkpoint_from_any_hook_holds_raw_weights_and_the_right_average(tmp_path):
    watch = Watch()
    before, after = (SaveEverywhere(tmp_path, watch, tag) for tag in ("before", "after"))
    ema = EMA((DECAY,))
    module = SavesAndFails(after.save, fail_at=1)
    start = trainable(module)
    limits = {"limit_train_batches": 2, "limit_val_batches": 1}
    with pytest.raises(ArithmeticError):
        fit(tmp_path, module, before, ema, watch, after, max_epochs=2, **limits)
    saved = before.saved + after.saved
    hooks = {path.name.split("-")[1] for path, _, _ in saved}
    assert {"exception", "validation_step", "validation_start", "validation_end"} <= hooks
    for path, raw, average in saved:
        full = torch.load(f"{path}.full", weights_only=True)
        light = torch.load(f"{path}.weights", weights_only=True)
        raw = raw or start
        for state in (full["state_dict"], light["state_dict"]):
            assert_same_bits({k: state[k].double() for k in raw}, raw)
            assert torch.equal(state["shared.weight"], state["inner.3.weight"])
        assert_close(full["callbacks"][ema.state_key]["shadows"][0], average or start)
    assert_same_bits(trainable(module), watch.history[-1])


def test_state_holds_tensors_and_builtins_by_name(tmp_path):
    ema = EMA((DECAY, 0.5), prefix="inner")
    fit(tmp_path, PlainModule(), ema)
    state = ema.state_dict()
    assert ema.state_key == "EMA{'prefix': 'inner'}"
    assert state["decays"] == [DECAY, 0.5]
    assert set(state["steps"].values()) == {4}
    assert [set(column) for column in state["shadows"]] == [set(state["steps"])] * 2
    assert EMA().state_dict() == {}
    assert EMA(0.99).names() == EMA((0.99,)).names() == ["raw", "ema", "ema_0.99"]
    assert EMA(0).names() == ["raw", "ema", "ema_0"]


@pytest.fixture
def checkpoint(tmp_path):
    trainer = fit(tmp_path, PlainModule(), EMA((DECAY,)))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    return tmp_path / "c.ckpt"


def test_evaluations_from_a_checkpoint_use_its_averages_and_a_fit_goes_on_from_them(
    tmp_path, checkpoint
):
    stored = torch.load(checkpoint, weights_only=True)
    module, spy, ema, watch = PlainModule(), Spy(), EMA((DECAY,), warmup=False), Watch()
    for run in ("validate", "test", "predict"):
        trainer = make_trainer(tmp_path, ema, spy)
        getattr(trainer, run)(module, loader(), ckpt_path=checkpoint)
        assert_same_bits(dict(module.state_dict()), dict(stored["state_dict"]))
    average = {
        k: v.double() for k, v in stored["callbacks"]["EMA{'prefix': ''}"]["shadows"][0].items()
    }
    assert len(spy.weights) == 12
    for weights in spy.weights:
        assert_same_bits(weights, average)
    fit(tmp_path, module, ema, watch)
    watch.history[0] = average
    assert_close(shadows(ema), watch.average(DECAY, warmup=False))


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_of_a_file_without_averages_are_used_as_they_are_also_after_a_fit(
    tmp_path, weights_only
):
    """A file of weights only, and a whole checkpoint that was written without EMA."""
    fit(tmp_path, PlainModule()).save_checkpoint(tmp_path / "c.ckpt", weights_only=weights_only)
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)["state_dict"]
    module, spy, ema = PlainModule(), Spy(), EMA((DECAY,))
    trainer = fit(tmp_path, module, ema, spy, max_epochs=3)
    with ema.weights("ema"), pytest.raises(RuntimeError, match=r"leave EMA\.weights\(\) first"):
        trainer.test(module, loader(), ckpt_path=tmp_path / "c.ckpt")
    spy.weights.clear()
    with pytest.warns(UserWarning, match="no averages"):
        trainer.test(module, loader(), ckpt_path=tmp_path / "c.ckpt")
    for weights in spy.weights:
        assert_same_bits(weights, {name: stored[name].double() for name in weights})
    assert len(spy.weights) == 4


def test_a_fit_from_a_file_without_averages_starts_them_anew(tmp_path):
    fit(tmp_path, PlainModule()).save_checkpoint(tmp_path / "c.ckpt")
    ema, watch, module = EMA((DECAY,)), Watch(), PlainModule()
    fit(tmp_path, module, ema, max_epochs=3)
    fit(tmp_path, module, ema, watch, ckpt_path=tmp_path / "c.ckpt", max_epochs=2)
    assert_close(shadows(ema), watch.average(DECAY))


def test_resume_continues_equal_decays_then_others_prints_changes_and_trains_on(tmp_path, caplog):
    trainer = fit(tmp_path, PlainModule(), first := EMA((0.9, 0.99)))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    ema, watch = EMA((0.99, 0.5, 0.4), warmup=False), Watch()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, PlainModule(), watch, ema, ckpt_path=tmp_path / "c.ckpt", max_epochs=2)
        assert [message for message in caplog.messages if message.startswith("EMA")] == [
            "EMA decay: the checkpoint had 0.9, using 0.5.",
            "EMA decay 0.4 is new: its average starts from the weights.",
        ]
        fit(tmp_path, PlainModule(), EMA((0.99,)), ckpt_path=tmp_path / "c.ckpt")  # which is over
    assert "EMA decay 0.9 of the checkpoint is dropped." in caplog.messages
    assert set(ema.state_dict()["steps"].values()) == {8}
    starts = shadows(first, 1), shadows(first, 0), watch.history[0]
    for which, (decay, start) in enumerate(zip(ema.decays, starts, strict=True)):
        watch.history[0] = {name: value.double() for name, value in start.items()}
        assert_close(shadows(ema, which), watch.average(decay, warmup=False))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda column: column.pop("inner.0.bias"),
            r"no average of the parameter 'inner\.0\.bias'",
        ),
        (lambda column: column.update(other=column["inner.0.bias"]), "'other', .*fits no param"),
        (lambda column: column.update({"inner.0.bias": torch.zeros(9)}), r"'inner\.0\.bias', .*9"),
    ],
    ids=["missing", "name", "shape"],
)
def test_averages_that_do_not_fit_the_module_are_refused_by_name(
    tmp_path, checkpoint, edit, message
):
    state = torch.load(checkpoint, weights_only=True)
    averages = state["callbacks"]["EMA{'prefix': ''}"]
    edit(averages["shadows"][0])
    averages["steps"] = dict.fromkeys(averages["shadows"][0], 4)
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, PlainModule(), EMA(), ckpt_path=tmp_path / "other.ckpt", max_epochs=2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # "cpu": updates are skipped as on a GPU
def test_a_resume_may_change_the_strides_of_weights(tmp_path, monkeypatch, checkpoint, device):
    monkeypatch.setattr("lit_diffusion.callbacks.finite_updates._DEFERRING_DEVICES", (device,))
    state = torch.load(checkpoint, weights_only=True)
    shadow = state["callbacks"]["EMA{'prefix': ''}"]["shadows"][0]
    for name, value in shadow.items():
        shadow[name] = value.T.contiguous().T if value.ndim == 2 else value
    torch.save(state, other := tmp_path / "other.ckpt")
    averages = []
    for path in (checkpoint, other):
        module, ema = PlainModule(optimizer=partial(torch.optim.Adam, fused=True)), EMA(DECAY)
        fit(tmp_path, module, ema, FiniteUpdates(), StepSeed(1), ckpt_path=path, max_epochs=3)
        averages.append(shadows(ema))
    assert_same_bits(*averages)
    weights = dict(module.named_parameters())
    assert all(value.stride() == weights[name].stride() for name, value in averages[1].items())


def test_a_second_fit_of_the_same_module_goes_on_and_another_module_starts_anew(tmp_path):
    ema, watch, module = EMA((DECAY,)), Watch(), PlainModule()
    fit(tmp_path, module, ema, watch)
    fit(tmp_path, module, ema, second := Watch())
    watch.history += second.history[1:]
    assert_close(shadows(ema), watch.average(DECAY))
    fit(tmp_path, PlainModule(), ema, third := Watch())
    assert_close(shadows(ema), third.average(DECAY))


class Searches(LearningRateFinder):
    """Before training and, as Lightning's documentation does it, again at later epochs."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in (1, 2):
            self.lr_find(trainer, pl_module)


def test_searches_for_the_lr_leave_no_trace_in_the_average(tmp_path):
    """Each restores a checkpoint in the end, averages included."""
    ema, watch = EMA((DECAY,)), Watch()
    search = Searches(num_training_steps=3)
    trainer = fit(tmp_path, PlainModule(), search, ema, MomentumDecay(), watch, max_epochs=3)
    assert set(ema.state_dict()["steps"].values()) == {trainer.global_step} == {12}
    assert_close(shadows(ema), watch.average(DECAY))


def test_averages_of_parameters_that_are_frozen_again_after_a_resume_wait_for_them(tmp_path):
    class Thaws(PlainModule):
        """Its first layer is frozen at the start and trained from the second epoch on."""

        def __init__(self):
            super().__init__()
            self.inner[0].requires_grad_(False)

        def on_train_epoch_start(self):
            self.inner[0].requires_grad_(self.current_epoch > 0)

        def configure_optimizers(self):
            return torch.optim.SGD([*self.inner.parameters()], lr=self.lr)

    def run(path, epochs, ckpt_path=None):
        ema, module = EMA((DECAY,)), Thaws()
        saves = ModelCheckpoint(path, "{epoch}", save_top_k=-1)
        options = {"max_epochs": epochs, "enable_checkpointing": True}
        fit(path, module, StepSeed(0), ema, saves, ckpt_path=ckpt_path, **options)
        return ema.state_dict()

    whole, saved = run(tmp_path / "whole", 3), tmp_path / "whole" / "epoch=1.ckpt"
    assert "inner.0.weight" in whole["steps"]
    assert_same_bits(run(tmp_path / "resumed", 3, saved), whole)
    # Saved again before the layer is trained again, its averages are still there.
    ema = EMA((DECAY,))

    class SavesFirst(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "early.ckpt")

    fit(tmp_path, Thaws(), ema, SavesFirst(), ckpt_path=saved, max_epochs=3)
    early = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"][ema.state_key]
    stored = torch.load(saved, weights_only=True)["callbacks"][ema.state_key]
    assert early["steps"] == stored["steps"]
    assert_same_bits(early["shadows"], stored["shadows"])


# Conflicts and accidents


def test_two_averages_of_different_submodules_coexist_and_overlapping_ones_are_refused(tmp_path):
    first, second = EMA((DECAY,), prefix="inner.0"), EMA((0.2,), prefix="inner.3")
    spy, module = Spy(), PlainModule()
    trainer = fit(tmp_path, module, first, second, spy, log_every_n_steps=4)
    decays = {k: round(v.item(), 6) for k, v in trainer.callback_metrics.items() if "ema" in k}
    assert decays == {"ema/decay_inner.0": round(4 / 13, 6), "ema/decay_inner.3": 0.2}
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    raw = trainable(module)
    trainer.validate(module, loader())
    assert_close({k: spy.weights[-1][k] for k in shadows(first)}, shadows(first), 0)
    assert_close({k: spy.weights[-1][k] for k in shadows(second)}, shadows(second), 0)
    assert_same_bits(trainable(module), raw)
    keys = torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"].keys()
    assert {first.state_key, second.state_key} <= keys
    for prefix in ("", "inner", "inner.0.weight"):
        with pytest.raises(ValueError, match="several decays"):
            fit(tmp_path, PlainModule(), first, EMA(prefix=prefix))


def test_a_weights_only_checkpoint_callback_is_warned_of(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_weights_only=True)
    with pytest.warns(UserWarning, match="raw weights only"):
        fit(tmp_path, PlainModule(), EMA(), saves, enable_checkpointing=True)


def test_steps_that_torch_makes_up_for_an_optimizers_state_do_not_count(tmp_path):
    class Looks(Callback):
        """torch steps an optimizer without state or gradients, with lr 0, to have it saved."""

        def on_train_start(self, trainer, pl_module):
            self.look(trainer, pl_module)

        def on_validation_start(self, trainer, pl_module):
            pl_module.zero_grad()
            self.look(trainer, pl_module)  # the averages are in place

        def look(self, trainer, pl_module):
            get_optimizer_state_dict(pl_module, trainer.optimizers[0])

    def run(*more):
        ema = EMA((DECAY,))
        module = PlainModule(optimizer=torch.optim.SGD)
        fit(tmp_path, module, StepSeed(0), ema, *more, max_epochs=2)
        return ema.state_dict()

    assert_same_bits(run(Looks()), run())


def test_an_average_that_is_not_finite_is_named_and_never_saved(tmp_path):
    class Breaks(PlainModule):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 2:
                self.inner[0].bias.grad.fill_(torch.nan)

    ema = EMA((DECAY,))
    with pytest.raises(FloatingPointError, match=r"'inner\.0\.bias'.*after 3 optimizer steps"):
        fit(tmp_path, Breaks(), ema, log_every_n_steps=1)
    ema = EMA((DECAY,))
    with pytest.raises(FloatingPointError, match=r"'inner\.0\..*'"):
        fit(tmp_path, Breaks(), ema)  # at the latest when validation wants it
    with pytest.raises(FloatingPointError):
        ema.state_dict()


def test_an_optimizer_that_hides_its_steps_is_named(tmp_path):
    class Clears(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self, closure):
            closure()
            self.zero_grad()

    with pytest.warns(UserWarning, match="saw none of"):
        fit(tmp_path, PlainModule(optimizer=Clears), EMA())


def test_nothing_is_left_on_module_and_optimizers_after_fit(tmp_path):
    ema, module = EMA((DECAY,)), PlainModule()
    trainer = fit(tmp_path, module, ema)
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks
    assert not module._state_dict_hooks
    assert not ema._raw  # the memory of copies
    with pytest.raises(ArithmeticError):
        fit(tmp_path, failing := SavesAndFails(fail_at=0), ema, num_sanity_val_steps=0)
    assert not failing._state_dict_hooks


@pytest.mark.parametrize("start", [0, 4])
def test_the_decay_in_force_is_logged(tmp_path, start):
    logger, ema = MemoryLogger(), EMA((0.5,), start=start)
    fit(tmp_path, PlainModule(), ema, max_epochs=4, logger=logger, log_every_n_steps=2)
    steps = [max(n - start, 0) for n in (2, 4, 6, 8, 10, 12, 14, 16)]
    logged = [decay for _, decay in logger.of("ema/decay")]
    assert logged == pytest.approx([min(0.5, n / (9 + n)) for n in steps])


def test_bad_arguments_are_refused():
    bad = [{"decays": decays} for decays in ((), (1.0,), (-0.1,), (0.9, 0.9))]
    for arguments in (*bad, {"every_n_steps": 0}, {"start": -1}):
        with pytest.raises(ValueError, match="got"):
            EMA(**arguments)
