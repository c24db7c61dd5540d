import math
from functools import partial

import pytest
import torch
from lightning.pytorch import callbacks as pl
from lightning.pytorch.plugins import MixedPrecision
from support.golden import load
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer, trainable
from support.recorded import ADAM, Recorded, TwoRecorded
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adagrad, Adam, AdamW, lr_scheduler

from lit_diffusion.callbacks import EMA, LRCompensation, MomentumDecay, StepSeed
from lit_diffusion.callbacks.momentum_decay import momentum_decay
from lit_diffusion.seeding import seed_step

STEPS = 8


def fit(folder, module, *callbacks, ckpt_path=None, batches=None, **options):
    """Eight steps, each an epoch of one batch; a resume is exact at the end of an epoch."""
    batches = loader(8, 8) if batches is None else batches
    options = {"max_epochs": STEPS, "log_every_n_steps": 1, **options}
    trainer = make_trainer(folder, StepSeed(0), *callbacks, **options)
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer


def updates(module):
    """(lr, beta1) of the first group in each update."""
    return [options[0] for _, options in module.used]


def expected(steps, total=STEPS, beta0=0.8, floor=0.4):
    """(lr, beta1) of the updates after so many steps, from an lr of 1e-2."""
    decays = [momentum_decay(step, total, beta0, floor) for step in steps]
    return [(1e-2 * lr_factor, beta1) for beta1, lr_factor in decays]


# The formula


@pytest.mark.parametrize("beta0", [0.8, 0.9])
def test_beta1_and_lr_factor_equal_the_golden_figures(beta0):
    golden = {
        key.split("/")[2]: value
        for key, value in load("case12_seed_formulas").items()
        if key.startswith(f"mdlrc/b{beta0}/")
    }
    assert len(golden["beta"]) == 101
    for step in range(101):
        assert momentum_decay(step, 100, beta0) == pytest.approx(
            (golden["beta"][step], golden["lr_mult"][step]), rel=0, abs=1e-12
        )
        assert momentum_decay(step, 100, beta0, min_beta1=0.0) == pytest.approx(
            (golden["beta_unclipped"][step], golden["lr_mult_unclipped"][step]), rel=0, abs=1e-12
        )
    total = 10**6
    last = int(golden["tau_floor"] * total)
    assert momentum_decay(last, total, beta0).beta1 > 0.4
    assert momentum_decay(last + 1, total, beta0).beta1 == 0.4


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_from_the_end_of_the_schedule_on_beta1_is_the_floor(floor):
    for step in (100, 101, 1000):
        beta1, lr_factor = momentum_decay(step, 100, 0.8, floor)
        assert beta1 == floor
        assert lr_factor * (1 - beta1) == pytest.approx(1 - 0.8, rel=1e-14)


def test_what_the_formula_does_not_cover_is_refused():
    lengths = [{"total_steps": number} for number in (0, math.nan, math.inf)]
    for wrong in (*lengths, {"min_beta1": -0.1}, {"min_beta1": 1.0}):
        with pytest.raises(ValueError, match=f"got {next(iter(wrong.values()))}"):
            MomentumDecay(**wrong)
    others = {"step": -1}, {"min_beta1": 0.9}, {"min_beta1": -0.1}, {"beta0": 1.0}
    for wrong in (*lengths, *others, {"beta0": math.nan}):
        arguments = {"step": 0, "total_steps": 10, "beta0": 0.8, "min_beta1": 0.4, **wrong}
        with pytest.raises(ValueError, match=f"got .*{next(iter(wrong.values()))}"):
            momentum_decay(**arguments)
    with pytest.raises(ValueError, match="lower min_beta1"):
        LRCompensation(beta0=0.3)


# Which options an update uses


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"fused": True}], ids=str)
def test_training_equals_a_plain_loop_with_the_formula_bit_for_bit(tmp_path, options):
    module, plain = (
        PlainModule(optimizer=partial(AdamW, betas=(0.8, 0.99), **options)) for _ in range(2)
    )
    fit(tmp_path, module, MomentumDecay())
    hand = plain.configure_optimizers()
    (group,), (batch,) = hand.param_groups, loader(8, 8)
    for step in range(STEPS):
        seed_step(0, 0, step, 0)
        beta1, lr_factor = momentum_decay(step, STEPS, beta0=0.8)
        group["betas"], group["lr"] = (beta1, 0.99), 1e-2 * lr_factor
        hand.zero_grad()
        plain.loss(batch).backward()
        hand.step()
    assert_same_bits(trainable(module), trainable(plain))
    assert momentum_decay(STEPS - 1, STEPS, 0.8).beta1 == 0.4


def chained(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 5)], milestones=[3]
    )


COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS + 1)
ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=STEPS + 1)


@pytest.mark.parametrize("schedule", [chained, partial(ONE_CYCLE, cycle_momentum=False)])
def test_with_any_schedule_lr_times_1_minus_beta1_is_as_without_also_after_a_resume(
    tmp_path, schedule
):
    reference, whole, first, second = (Recorded(schedule=schedule) for _ in range(4))
    fit(tmp_path, reference)
    fit(tmp_path, whole, MomentumDecay())
    fit(tmp_path, first, MomentumDecay(STEPS), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    fit(tmp_path, second, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    assert whole.visible == reference.visible  # schedules go on from the optimizer's own lr
    assert first.used + second.used == whole.used
    for step, (lr, beta1) in enumerate(updates(whole)):
        base_lr, decayed = updates(reference)[step][0], momentum_decay(step, STEPS, beta0=0.8)
        assert (beta1, lr) == (decayed.beta1, base_lr * decayed.lr_factor)
        assert lr * (1 - beta1) == pytest.approx(base_lr * (1 - 0.8), rel=1e-14)
    assert step == STEPS - 1


@pytest.mark.parametrize("compensate_lr", [True, False])
def test_several_groups_decay_from_their_own_beta1_and_lr(tmp_path, compensate_lr):
    class Groups(Recorded):
        def make_optimizer(self, params):
            first = {"params": params[:2], "lr": 0.1, "betas": (0.9, 0.99)}
            return super().make_optimizer([first, {"params": params[2:]}])

    module = Groups()
    trainer = fit(tmp_path, module, MomentumDecay(compensate_lr=compensate_lr))
    for step, options in module.used:
        for (lr, beta1), base_lr, beta0 in zip(options, (0.1, 1e-2), (0.9, 0.8), strict=True):
            decayed = momentum_decay(step, STEPS, beta0)
            assert beta1 == decayed.beta1
            assert lr == base_lr * (decayed.lr_factor if compensate_lr else 1)
    assert {k for k in trainer.callback_metrics if "mdlrc" in k} == {
        f"mdlrc/{name}_group{number}" for name in ("beta1", "lr") for number in (0, 1)
    }


def test_demon_decays_the_momentum_of_others_than_adam_and_leaves_the_lr(tmp_path):
    module = Recorded(partial(SGD, momentum=0.9))
    fit(tmp_path, module, MomentumDecay(min_beta1=0.2, compensate_lr=False))
    momenta = [beta1 for _, beta1 in expected(range(STEPS), beta0=0.9, floor=0.2)]
    assert updates(module) == [(1e-2, momentum) for momentum in momenta]


def test_accumulated_batches_are_one_update_and_clipped_gradients_do_not_matter(tmp_path):
    module = Recorded()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-3, "max_epochs": 4}
    fit(tmp_path, module, MomentumDecay(), batches=loader(48, 8), **options)
    assert updates(module) == expected(range(8))
    assert {options[0] for _, options in module.visible} == {(1e-2, 0.8)}
    assert len(module.visible) == 24


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_counts_only_if_the_optimizer_is_called(tmp_path, fused):
    """As a fused one is, which then changes no weight."""

    class Overflows(Recorded):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if self.global_step in (0, 2) else loss

    def scaler():
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))

    module, resumed = Overflows(partial(ADAM, fused=fused)), MomentumDecay(STEPS)
    trainer = fit(tmp_path, module, MomentumDecay(), plugins=[scaler()])
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    options = {"ckpt_path": tmp_path / "c.ckpt", "max_epochs": STEPS + 1, "plugins": [scaler()]}
    fit(tmp_path, Recorded(partial(ADAM, fused=fused)), resumed, **options)
    assert len(module.used) == (8 if fused else 6)
    assert resumed.state_dict()["steps"] == [len(module.used) + 1]
    for update, values in zip(updates(module), expected(range(len(module.used))), strict=True):
        assert update == pytest.approx(values, rel=1e-15)
    assert {options[0] for _, options in module.visible} == {(1e-2, 0.8)}


def test_a_step_that_torch_takes_to_initialize_state_is_no_update(tmp_path):
    module = Recorded()
    module.on_train_start = lambda: get_optimizer_state_dict(module, module.trainer.optimizers[0])
    fit(tmp_path, module, MomentumDecay())
    assert updates(module) == [(0.0, 0.8), *expected(range(STEPS))]


def test_monitors_log_the_optimizers_own_lr_and_the_callback_what_updates_used(tmp_path):
    module, logger = Recorded(schedule=COSINE), MemoryLogger()
    fit(tmp_path, module, MomentumDecay(), pl.LearningRateMonitor(log_momentum=True), logger=logger)
    for name, values in {
        "lr-Adam": [options[0][0] for _, options in module.visible],
        "lr-Adam-momentum": [0.8] * STEPS,
        "mdlrc/lr": [lr for lr, _ in updates(module)],
        "mdlrc/beta1": [beta1 for _, beta1 in updates(module)],
    }.items():
        assert [value for _, value in logger.of(name)] == pytest.approx(values, rel=1e-6)


def test_after_an_update_that_failed_the_own_options_are_back_also_in_a_checkpoint(tmp_path):
    def failing(params, lr):
        optimizer = ADAM(params, lr=lr)
        optimizer.register_step_post_hook(fail)
        return optimizer

    def fail(*_):
        if module.global_step == 3:
            raise ArithmeticError

    module, decay = PlainModule(optimizer=failing), MomentumDecay()
    save = lambda trainer, *_: trainer.save_checkpoint(tmp_path / "c.ckpt")  # noqa: E731
    with pytest.raises(ArithmeticError):
        fit(tmp_path, module, pl.LambdaCallback(on_exception=save), decay)
    optimizer = module.trainer.optimizers[0]
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)
    for state in (optimizer.state_dict(), stored["optimizer_states"][0]):
        (group,) = state["param_groups"]
        assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.999))
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    assert stored["callbacks"][decay.state_key] == {"total_steps": STEPS, "steps": [3]}


# The control


def test_the_control_has_the_lr_of_every_update_and_constant_momentum(tmp_path):
    decayed = Recorded(partial(Adam, betas=(0.9, 0.999)), chained)
    control = Recorded(partial(Adam, betas=(0.95, 0.999)), chained)
    fit(tmp_path, decayed, MomentumDecay(min_beta1=0.6))
    fit(tmp_path, control, LRCompensation(beta0=0.9, min_beta1=0.6))
    assert updates(control) == [(lr, 0.95) for lr, _ in updates(decayed)]
    assert updates(decayed)[-1][1] == 0.6


@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), Adagrad])
def test_the_control_takes_optimizers_with_any_momentum_or_none(tmp_path, optimizer):
    module = Recorded(optimizer)
    trainer = fit(tmp_path, module, LRCompensation())
    assert [lr for lr, _ in updates(module)] == [lr for lr, _ in expected(range(STEPS))]
    logs_momentum = "mdlrc/beta1" in trainer.callback_metrics
    assert logs_momentum == ("momentum" in trainer.optimizers[0].param_groups[0])


# What is refused before the first step


class Lion(torch.optim.Optimizer):
    """Steps by a sign, so beta1 is no part of their length."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})


class Uncalled(Adam):
    """Has not called Optimizer.__init__, as published Lookaheads."""

    def __init__(self, params, lr):
        vars(self).update(vars(Adam(params, lr)))

    step = Adam.step.__wrapped__


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (partial(Adam, betas=(0.3, 0.9)), {}, "min_beta1=0.4 and beta0=0.3, .*lower min_beta1"),
        (SGD, {}, "SGD: .* compensate_lr=False or use Adam"),
        (SGD, {"compensate_lr": False}, "min_beta1=0.4 and beta0=0"),
        (Lion, {}, "Lion: .* pass compensate_lr=False"),
        (type("AdamWScheduleFree", (Adam,), {}), {}, "AdamWScheduleFree: it has none"),
        (Adagrad, {"compensate_lr": False}, "Adagrad: it has none; use Adam"),
        (Uncalled, {}, "Uncalled is something else, or has not called"),
        (ADAM, {"optimizers": [1]}, r"from 0 to 0, got \[1\]"),
        (ADAM, {"optimizers": []}, r"from 0 to 0, got \[\]"),
        (ADAM, {"optimizers": [-1]}, r"from 0 to 0, got \[-1\]"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(tmp_path, optimizer, arguments, message):
    decay = MomentumDecay(**arguments)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, Recorded(optimizer), decay)
    assert decay.state_dict() == {}  # before data are loaded


def in_sequence(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), ONE_CYCLE(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize("schedule", [ONE_CYCLE, in_sequence])
def test_schedules_that_cycle_the_momentum_are_refused_and_the_control_takes_them(
    tmp_path, schedule
):
    with pytest.raises(ValueError, match="pass cycle_momentum=False"):
        fit(tmp_path, Recorded(schedule=schedule), MomentumDecay())
    module = Recorded(schedule=schedule)
    fit(tmp_path, module, LRCompensation())
    assert len(module.used) == STEPS


@pytest.mark.parametrize(("make", "options"), [(Recorded, {"max_epochs": -1}), (TwoRecorded, {})])
def test_an_unknown_length_is_refused(tmp_path, make, options):
    module = make()
    with pytest.raises(
        ValueError, match=r"cannot compute the number of .* steps .*; pass a number"
    ):
        fit(tmp_path, module, MomentumDecay(), **options)
    assert module.visible == []


def test_a_state_that_was_not_saved_by_it_is_refused():
    for total, steps in ((0, [1]), ("9", [1]), (None, [1]), (9, [-1]), (9, 1), (9, None)):
        with pytest.raises(ValueError, match="is damaged: total_steps must be 1 or more"):
            MomentumDecay().load_state_dict({"total_steps": total, "steps": steps})


# The length of the schedule


@pytest.fixture
def checkpoint(tmp_path):
    """After 3 of 8 steps."""
    trainer = fit(tmp_path, Recorded(), MomentumDecay(STEPS), max_epochs=3)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    return tmp_path / "c.ckpt"


@pytest.mark.parametrize(
    ("total", "epochs", "used", "warning"),
    [
        (20, 12, 20, "is 8 in the checkpoint and 20 in this run; using 20"),
        (None, 12, 8, r"is 8 in the checkpoint and 12 in this run; using 8\. Pass total_steps"),
        (None, -1, 8, "is 8 in the checkpoint and None in this run; using 8"),
    ],
)
def test_on_resume_an_explicit_total_wins_and_none_keeps_that_of_the_checkpoint(
    tmp_path, checkpoint, total, epochs, used, warning
):
    module = Recorded()
    stop = lambda *_: setattr(module.trainer, "should_stop", module.global_step == 12)  # noqa: E731
    module.on_train_batch_end = stop
    with pytest.warns(UserWarning, match=warning):
        fit(tmp_path, module, MomentumDecay(total), ckpt_path=checkpoint, max_epochs=epochs)
    assert updates(module) == expected(range(3, 12), used)


def test_the_length_of_another_run_is_forgotten(tmp_path, checkpoint):
    decay = MomentumDecay()
    fit(tmp_path, Recorded(), decay, ckpt_path=checkpoint)
    assert decay.state_dict() == {"total_steps": 8, "steps": [8]}
    fit(tmp_path, Recorded(), decay, max_epochs=3)
    assert decay.state_dict() == {"total_steps": 3, "steps": [3]}


def test_a_run_without_the_callback_goes_on_with_it_where_the_schedule_would_be(tmp_path):
    fit(tmp_path, Recorded(), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    module = Recorded()
    trainer = fit(tmp_path, module, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    trainer.fit(module, loader(8, 8), ckpt_path=tmp_path / "c.ckpt")
    assert updates(module) == 2 * expected(range(3, 8))


def test_a_second_fit_of_one_trainer_goes_on_whatever_was_tested_between(tmp_path):
    module = TwoRecorded()
    trainer = fit(tmp_path, module, MomentumDecay(total_steps=STEPS), max_epochs=3)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(8, 8))
    trainer.test(module, loader(8, 8), ckpt_path=tmp_path / "c.ckpt", verbose=False)
    trainer.fit_loop.max_epochs = STEPS
    trainer.fit(module, loader(8, 8))
    assert module.used == {"often": expected(range(8)), "seldom": expected(range(4))}


class Searches(pl.LearningRateFinder):
    """Before training and, as Lightning's documentation does it, again at a later epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.lr_find(trainer, pl_module)


def test_searches_for_the_lr_leave_no_trace(tmp_path):
    module, decay, ema = Recorded(), MomentumDecay(), EMA()
    fit(tmp_path, module, decay, ema, Searches(num_training_steps=4))
    momenta = [beta1 for _, beta1 in updates(module)]
    decayed = [beta1 for _, beta1 in expected(range(STEPS))]
    assert momenta[:6] == [0.8] * 4 + decayed[:2]
    assert len(momenta[6:]) > 6
    assert momenta[-6:] == decayed[2:]
    assert set(ema.state_dict()["steps"].values()) == {STEPS}
    assert decay.state_dict() == {"total_steps": STEPS, "steps": [STEPS]}


# Several optimizers


@pytest.mark.parametrize(("which", "decays"), [(None, (True, True)), ([1], (False, True))])
def test_each_chosen_optimizer_decays_with_its_own_steps(tmp_path, which, decays):
    module = TwoRecorded()
    trainer = fit(tmp_path, module, MomentumDecay(total_steps=8, optimizers=which))
    for used, count, decay in zip(module.used.values(), (8, 4), decays, strict=True):
        assert used == (expected(range(count)) if decay else [(1e-2, 0.8)] * count)
    logged = {name for name in trainer.callback_metrics if "mdlrc" in name}
    assert logged == {
        f"mdlrc/{name}_optimizer{i}" for i in (0, 1) if decays[i] for name in ("beta1", "lr")
    }


def test_two_callbacks_may_serve_an_optimizer_each_and_never_one_together(tmp_path):
    module = TwoRecorded()
    control = LRCompensation(4, beta0=0.8, optimizers=[1])
    fit(tmp_path, module, MomentumDecay(8, optimizers=[0]), control)
    assert module.used["often"] == expected(range(8), 8)
    assert module.used["seldom"] == [(lr, 0.8) for lr, _ in expected(range(4), 4)]
    with pytest.raises(ValueError, match="MomentumDecay and LRCompensation would change the same"):
        fit(tmp_path, Recorded(), MomentumDecay(), LRCompensation())


def test_counts_of_two_optimizers_resume_exactly_after_any_batch(tmp_path):
    saves = pl.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = TwoRecorded()
    fit(tmp_path, whole, MomentumDecay(total_steps=8), saves, enable_checkpointing=True)
    for epoch in (0, 3):
        module, saved = TwoRecorded(), tmp_path / f"epoch={epoch}.ckpt"
        fit(tmp_path, module, MomentumDecay(total_steps=8), ckpt_path=saved)
        assert module.used["often"] == whole.used["often"][epoch + 1 :]
        assert module.used["seldom"] == whole.used["seldom"][epoch // 2 + 1 :]
        assert_same_bits(trainable(module), trainable(whole))


@pytest.mark.parametrize("steps", [None, [5], [3, 2, 0]])
def test_counts_that_are_missing_or_of_other_optimizers_are_refused(tmp_path, steps):
    decay = MomentumDecay(total_steps=8)
    fit(tmp_path, TwoRecorded(), decay, max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert state["callbacks"].pop(decay.state_key) == {"total_steps": 8, "steps": [3, 2]}
    if steps is not None:
        state["callbacks"][decay.state_key] = {"total_steps": 8, "steps": steps}
    torch.save(state, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match="needs a step count for each of 2 optimizers"):
        fit(tmp_path, TwoRecorded(), MomentumDecay(8), ckpt_path=tmp_path / "c.ckpt")
