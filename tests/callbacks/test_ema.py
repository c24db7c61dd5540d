import copy
import logging
import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.dispatched import CountOperations
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

from lit_diffusion import load
from lit_diffusion.callbacks import EMA, StepSeed
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


# The state in a checkpoint

SOUND = {
    "decays": [0.9, 0.5],
    "steps": {"a": 3, "b": 0},
    "shadows": [{"a": torch.zeros(2), "b": torch.zeros(1)} for _ in range(2)],
}


@pytest.mark.parametrize(
    ("reason", "edit"),
    [
        ("decays must be", lambda s: s.update(decays=[math.nan, 0.5])),
        ("steps must be", lambda s: s["steps"].update(a=-10)),
        ("average of each parameter", lambda s: s["shadows"][1].pop("a")),
        ("differ in shape", lambda s: s["shadows"][1].update(a=torch.zeros(3))),
        ("of real numbers", lambda s: s["shadows"][1].update(a=torch.zeros(2, dtype=torch.int64))),
        ("for each decay", lambda s: s["shadows"].pop()),
        ("snapshots must be hashes", lambda s: s.update(snapshots={"a": "b"})),
        ("must hold decays, steps", lambda s: s.pop("steps")),
    ],
)
def test_a_state_that_no_ema_saves_is_refused(reason, edit):
    state = copy.deepcopy(SOUND)
    check_averages(state)
    check_averages({})
    edit(state)
    for damaged, why in ((state, reason), ([state], "must hold decays")):
        with pytest.raises(ValueError, match=why):
            check_averages(damaged)


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


# Buffers, and averages on the CPU


class CountedSteps(PlainModule):
    """Remembers the operations of each optimizer step, with its closure."""

    def optimizer_step(self, *args):
        with CountOperations() as operations:
            super().optimizer_step(*args)
        self.counts = [*getattr(self, "counts", []), operations.counts]


@pytest.mark.parametrize("decays", [(0.9,), (0.9, 0.99)])
def test_an_optimizer_step_has_one_operation_more_for_each_decay(tmp_path, decays):
    plain, averaged = CountedSteps(), CountedSteps()
    fit(tmp_path, plain)
    fit(tmp_path, averaged, EMA(decays))
    more = [ours - without for ours, without in zip(averaged.counts, plain.counts, strict=True)]
    assert more[1:] == [{"_foreach_lerp_": len(decays)}] * 3


class Buffers(Callback):
    """The module's buffers after each optimizer step, and those in validations."""

    def __init__(self):
        self.after_steps, self.validated = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.after_steps.append(copy.deepcopy(dict(pl_module.named_buffers())))

    def on_validation_batch_start(self, trainer, pl_module, *args):
        self.validated.append(copy.deepcopy(dict(pl_module.named_buffers())))


RUNNING = {"inner.1.running_mean", "inner.1.running_var"}


@pytest.mark.parametrize("start", [0, 3])
def test_buffers_are_averaged_with_the_weights_where_that_is_asked(tmp_path, start):
    ema, buffers, module = EMA((DECAY,), buffers=True, start=start), Buffers(), PlainModule()
    module.register_buffer("unsaved", torch.ones(2), persistent=False)
    initial = copy.deepcopy(dict(module.named_buffers()))
    fit(tmp_path, module, ema, buffers, max_epochs=2, num_sanity_val_steps=0)
    averages = shadows(ema)
    assert averages.keys() == {n for n, p in module.named_parameters() if p.requires_grad} | RUNNING
    watch = Watch()
    watch.history = [{n: b[n].double() for n in RUNNING} for b in [initial, *buffers.after_steps]]
    del watch.history[:start]
    assert_close({name: averages[name] for name in RUNNING}, watch.average(DECAY))
    for name in RUNNING:
        assert torch.equal(buffers.validated[-1][name], averages[name])
        assert torch.equal(module.state_dict()[name], buffers.after_steps[-1][name])
    plain, live = PlainModule(), Buffers()
    fit(tmp_path, plain, EMA((DECAY,)), live, max_epochs=2, num_sanity_val_steps=0)
    assert_same_bits(plain.state_dict(), module.state_dict())
    assert_same_bits(live.validated[-1], live.after_steps[-1])  # without `buffers=True`


def test_the_vectors_of_spectral_norm_stay_those_of_the_weights(tmp_path):
    """Averaged, they are shorter than 1, and the norm that divides the weight is too small."""
    module = PlainModule()
    nn.utils.parametrizations.spectral_norm(module.inner[0])
    nn.utils.spectral_norm(module.inner[3])
    fit(tmp_path, module, ema := EMA((DECAY,), buffers=True), max_epochs=2)
    assert shadows(ema).keys() > RUNNING
    assert not any(name.endswith(("_u", "_v")) for name in shadows(ema))
    module.eval()
    with ema.weights("ema"):
        for layer in (module.inner[0], module.inner[3]):
            layer(torch.zeros(1, layer.in_features))  # which computes the weight of the hook
            largest = torch.linalg.matrix_norm(layer.weight, 2)
            assert largest.item() == pytest.approx(1, abs=0.1)


def test_averages_of_buffers_go_on_at_a_resume_and_are_loaded(tmp_path):
    whole, first, again = (EMA((DECAY,), buffers=True) for _ in range(3))
    fit(tmp_path, PlainModule(), whole, StepSeed(1), max_epochs=2)
    fit(tmp_path, PlainModule(), first, StepSeed(1)).save_checkpoint(tmp_path / "half.ckpt")
    resumed = {"max_epochs": 2, "ckpt_path": tmp_path / "half.ckpt"}
    fit(tmp_path, PlainModule(), again, StepSeed(1), **resumed)
    assert_same_bits(shadows(again), shadows(whole))
    loaded = load(tmp_path / "half.ckpt", module=PlainModule()).state_dict()
    expected = shadows(first) | {"shared.weight": shadows(first)["inner.3.weight"]}
    assert_same_bits({name: loaded[name] for name in expected}, expected)


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
def test_averages_are_float32_or_wider_and_used_in_the_dtype_of_the_weights(
    tmp_path, precision, wide
):
    ema, module, spy = EMA((0.9, 0.99)), PlainModule(), Spy()
    trainer = fit(tmp_path, module, ema, spy, precision=precision)
    assert {v.dtype for which in (0, 1) for v in shadows(ema, which).values()} == {wide}
    raw = copy.deepcopy(module.state_dict())
    trainer.validate(module, loader())
    average = {name: v.to(module.dtype).double() for name, v in shadows(ema).items()}
    assert_same_bits(spy.weights[-1], average)
    assert_same_bits(dict(module.state_dict()), dict(raw))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_move_the_average(tmp_path, fused):
    class Overflows(PlainModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if batch_idx in (0, 2) else loss

        def on_train_batch_end(self, *args):
            states.append(copy.deepcopy(ema.state_dict()))

    ema, states = EMA((DECAY,)), []
    module = Overflows(optimizer=partial(torch.optim.Adam, fused=fused))
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(tmp_path, module, ema, plugins=[scaler])
    assert [set(state["steps"].values()) for state in states] == [{0}, {1}, {1}, {2}]
    assert_same_bits(states[2], states[1])


class Two(PlainModule):
    """Steps an optimizer in each batch, and another in every second; remembers the weights."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for layer, optimizer, every in zip(self.steps, self.optimizers(), (1, 2), strict=True):
            if batch_idx % every == 0:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.steps[layer].append(trainable(self))

    def configure_optimizers(self):
        self.steps = {"inner.0": [trainable(self)], "inner.3": [trainable(self)]}
        return [torch.optim.SGD(self.inner[layer].parameters(), 0.1) for layer in (0, 3)]


@pytest.mark.parametrize("prefix", ["", "inner.3"])
def test_with_two_optimizers_each_network_is_averaged_when_its_own_optimizer_steps(
    tmp_path, prefix
):
    """Also where one of them holds nothing that is averaged."""
    module, ema, watch = Two(), EMA((DECAY,), prefix=prefix), Watch()
    fit(tmp_path, module, ema)
    assert [len(history) - 1 for history in module.steps.values()] == [4, 2]
    averages = {}
    for layer, history in module.steps.items():
        watch.history = history
        averages |= {k: v for k, v in watch.average(DECAY).items() if k.startswith(layer)}
    assert_close(shadows(ema), {k: v for k, v in averages.items() if k.startswith(prefix)})


def test_parameters_that_are_unfrozen_added_or_replaced_are_averaged_from_then_on(tmp_path):
    class LastEpoch(Watch):
        def on_train_epoch_start(self, *args):
            self.history = []

    class Grows(PlainModule):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.frozen.requires_grad_(True)
                self.extra = nn.Parameter(torch.ones(4))
                self.inner[3] = self.shared = nn.Linear(8, 4, bias=False)
                new = *self.frozen.parameters(), self.extra, *self.inner[3].parameters()
                self.optimizers().add_param_group({"params": new})

        def loss(self, batch):
            return super().loss(batch) + getattr(self, "extra", torch.zeros(1)).pow(2).sum()

    ema, watch, module = EMA((DECAY,), warmup=False), LastEpoch(), Grows()
    fit(tmp_path, module, ema, watch, max_epochs=2)
    new = {"frozen.weight", "frozen.bias", "extra", "inner.3.weight"}
    late = {k: v for k, v in watch.average(DECAY, warmup=False).items() if k in new}
    assert_close({k: shadows(ema)[k] for k in new}, late)
    with ema.weights("ema"):
        assert torch.equal(module.inner[3].weight, shadows(ema)["inner.3.weight"])


@pytest.mark.parametrize("start", [3, 20])
def test_until_the_start_the_averages_are_the_weights(tmp_path, start):
    ema, watch = EMA((DECAY,), start=start), Watch()
    fit(tmp_path, PlainModule(), ema, watch, max_epochs=2)  # 8 steps
    watch.history = watch.history[start:] or watch.history[-1:]
    assert_close(shadows(ema), watch.average(DECAY))


def test_averaging_may_start_between_two_updates_of_the_averages(tmp_path):
    ema, watch = EMA((DECAY,), warmup=False, every_n_steps=4, start=2), Watch()
    fit(tmp_path, PlainModule(), ema, watch)  # 4 steps
    first, last, decay = watch.history[2], watch.history[4], DECAY**2
    expected = {name: decay * first[name] + (1 - decay) * last[name] for name in first}
    assert_close(shadows(ema), expected)


def test_prefix_names_a_whole_submodule(tmp_path):
    ema = EMA(prefix="inner.0.")
    fit(tmp_path, PlainModule(), ema)
    assert set(shadows(ema)) == {"inner.0.weight", "inner.0.bias"}
    with pytest.raises(ValueError, match=r"'inn'.*'frozen', 'inner'"):
        fit(tmp_path, PlainModule(), EMA(prefix="inn"))


# Which weights an evaluation uses


def test_before_the_first_update_evaluations_see_the_raw_weights(tmp_path):
    class LoadsLate(PlainModule):
        @torch.no_grad()
        def on_train_start(self):
            for param in self.parameters():
                param.add_(1)

    spy, ema, watch, module = Spy(), EMA((DECAY,), every_n_steps=3), Watch(), LoadsLate()
    start = trainable(module)
    options = {"max_steps": 4, "val_check_interval": 1, "num_sanity_val_steps": 1}
    fit(tmp_path, module, ema, spy, watch, **options)
    sanity, first, second, third = spy.weights[:1] + spy.weights[1:13:4]
    assert_same_bits(sanity, start)
    assert_same_bits([first, second], watch.history[1:3])
    assert_close(third, shadows(ema), 0)
    # Not from the weights before they were loaded.
    assert_close(watch.history[0], {name: value + 1 for name, value in start.items()})
    d = 1 / 10 * 2 / 11 * 3 / 12
    loaded, last = watch.history[0], watch.history[3]
    assert_close(shadows(ema), {k: d * loaded[k] + (1 - d) * v for k, v in last.items()})


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
    with pytest.raises(ValueError, match=r"EMA provides the weights .*'best'"), ema.weights("best"):
        pass
    with pytest.raises(RuntimeError, match="no averages"), EMA().weights("ema"):
        pass


def test_training_under_averaged_weights_is_refused(tmp_path):
    class StepsInside(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            with ema.weights("ema"):
                trainer.optimizers[0].step()

    ema, module = EMA((DECAY,)), PlainModule()
    fit(tmp_path, module, ema)
    raw = trainable(module)
    with ema.weights("ema"), pytest.raises(RuntimeError, match="leave EMA"):
        fit(tmp_path, module, ema)
    with pytest.raises(RuntimeError, match="would be lost"):
        fit(tmp_path, module, ema, StepsInside())
    assert not torch.equal(trainable(module)["inner.0.weight"], raw["inner.0.weight"])


# Checkpoints


class SaveEverywhere(Callback):
    """Saves in every hook, full and weights only, and checks what the files hold."""

    HOOKS = (
        *("train_batch_start", "train_epoch_end", "exception"),
        *(f"validation_{place}" for place in ("start", "batch_end", "epoch_end", "end")),
    )

    def __init__(self, path, watch, start):
        self.path, self.watch, self.start, self.hooks = path, watch, start, set()
        for hook in self.HOOKS:
            setattr(self, f"on_{hook}", partial(self.save, hook))

    def save(self, hook, trainer, *_):
        raw = self.watch.history[-1] if self.watch.history else self.start
        average = self.watch.average(DECAY) if self.watch.history else self.start
        for weights_only in (True, False):
            trainer.save_checkpoint(self.path, weights_only=weights_only)
            saved = torch.load(self.path, weights_only=True)
            state = saved["state_dict"]
            assert_same_bits({k: state[k].double() for k in raw}, raw)
            assert torch.equal(state["shared.weight"], state["inner.3.weight"])
        assert_close(saved["callbacks"][EMA().state_key]["shadows"][0], average)
        self.hooks.add(hook)


def test_a_checkpoint_from_any_hook_holds_raw_weights_and_the_right_average(tmp_path):
    def validation_step(batch, batch_idx):
        after.save("validation_step", module.trainer)
        if module.current_epoch == 1:
            raise ArithmeticError("in validation")

    watch, module = Watch(), PlainModule()
    before, after = (
        SaveEverywhere(tmp_path / "c.ckpt", watch, trainable(module)) for _ in range(2)
    )
    module.validation_step = validation_step
    limits = {"limit_train_batches": 2, "limit_val_batches": 1}
    with pytest.raises(ArithmeticError):
        fit(tmp_path, module, before, EMA((DECAY,)), watch, after, max_epochs=2, **limits)
    assert before.hooks | {"validation_step"} == after.hooks == {*after.HOOKS, "validation_step"}
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
    average = stored["callbacks"][ema.state_key]["shadows"][0]
    average = {name: value.double() for name, value in average.items()}
    assert_same_bits(spy.weights, [average] * 12)
    fit(tmp_path, module, ema, watch)
    watch.history[0] = average
    assert_close(shadows(ema), watch.average(DECAY, warmup=False))


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_of_a_file_without_averages_are_used_as_they_are_also_after_a_fit(
    tmp_path, weights_only
):
    """A file of weights only, and a whole checkpoint that was written without EMA."""
    file, module, spy, ema = tmp_path / "c.ckpt", PlainModule(), Spy(), EMA((DECAY,))
    fit(tmp_path, PlainModule()).save_checkpoint(file, weights_only=weights_only)
    stored = torch.load(file, weights_only=True)["state_dict"]
    trainer = fit(tmp_path, module, ema, spy, max_epochs=3)
    with ema.weights("ema"), pytest.raises(RuntimeError, match=r"leave EMA\.weights\(\) first"):
        trainer.test(module, loader(), ckpt_path=file)
    spy.weights.clear()
    with pytest.warns(UserWarning, match="no averages"):
        trainer.test(module, loader(), ckpt_path=file)
    expected = {name: stored[name].double() for name in trainable(module)}
    assert_same_bits(spy.weights, [expected] * 4)


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
        (lambda s: s.pop("inner.0.bias"), r"no average of the parameter 'inner\.0\.bias'"),
        (lambda s: s.update(other=s["inner.0.bias"]), "'other', .*fits no param"),
        (lambda s: s.update({"inner.0.bias": torch.zeros(9)}), r"'inner\.0\.bias', .*9"),
    ],
)
def test_averages_that_do_not_fit_the_module_are_refused_by_name(
    tmp_path, checkpoint, edit, message
):
    state = torch.load(checkpoint, weights_only=True)
    averages = state["callbacks"][EMA().state_key]
    edit(averages["shadows"][0])
    averages["steps"] = dict.fromkeys(averages["shadows"][0], 4)
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, PlainModule(), EMA(), ckpt_path=tmp_path / "other.ckpt", max_epochs=2)


def test_a_second_fit_of_the_same_module_goes_on_and_another_module_starts_anew(tmp_path):
    ema, watch, module = EMA((DECAY,)), Watch(), PlainModule()
    fit(tmp_path, module, ema, watch)
    fit(tmp_path, module, ema, second := Watch())
    watch.history += second.history[1:]
    assert_close(shadows(ema), watch.average(DECAY))
    fit(tmp_path, PlainModule(), ema, third := Watch())
    assert_close(shadows(ema), third.average(DECAY))


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


def test_an_average_that_is_not_finite_is_named_and_never_saved(tmp_path):
    class Breaks(PlainModule):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 2:
                self.inner[0].bias.grad.fill_(torch.nan)

    with pytest.raises(FloatingPointError, match=r"'inner\.0\.bias'.*after 3 optimizer steps"):
        fit(tmp_path, Breaks(), EMA((DECAY,)), log_every_n_steps=1)
    ema = EMA((DECAY,))
    with pytest.raises(FloatingPointError, match=r"'inner\.0\..*'"):
        fit(tmp_path, Breaks(), ema)  # at the latest when validation wants it
    with pytest.raises(FloatingPointError):
        ema.state_dict()


@pytest.mark.parametrize("start", [0, 4])
def test_the_decay_in_force_is_logged(tmp_path, start):
    logger, ema = MemoryLogger(), EMA((0.5,), start=start)
    fit(tmp_path, PlainModule(), ema, max_epochs=3, logger=logger, log_every_n_steps=2)
    steps = [max(n - start, 0) for n in (2, 4, 6, 8, 10, 12)]
    logged = [decay for _, decay in logger.of("ema/decay")]
    assert logged == pytest.approx([min(0.5, n / (9 + n)) for n in steps])


def test_bad_arguments_are_refused():
    bad = [{"decays": decays} for decays in ((), (1.0,), (-0.1,), (0.9, 0.9))]
    for arguments in (*bad, {"every_n_steps": 0}, {"start": -1}):
        with pytest.raises(ValueError, match="got"):
            EMA(**arguments)
