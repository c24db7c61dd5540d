import copy
import itertools
import random
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from support.golden import load
from support.plain_module import (
    PlainModule,
    Watch,
    assert_same_bits,
    loader,
    make_trainer,
    trainable,
)
from support.recorded import ADAM, Recorded
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from lit_diffusion.callbacks import EMA, LRCompensation, MomentumDecay, StepSeed
from lit_diffusion.callbacks.momentum_decay import momentum_decay
from lit_diffusion.lr_schedules import WarmupConstant, WarmupCosine
from lit_diffusion.seeding import seed_step

STEPS = 8


def fit(folder, module, *callbacks, ckpt_path=None, batches=None, **options):
    """Eight steps, each an epoch of one batch; a resume is exact at the end of an epoch."""
    options = {"max_epochs": STEPS, "log_every_n_steps": 1, **options}
    trainer = make_trainer(folder, StepSeed(0), *callbacks, **options)
    trainer.fit(module, batches or loader(8, 8), ckpt_path=ckpt_path)
    return trainer


def lrs(used):
    return [options[0][0] for _, options in used]


def momenta(used):
    return [options[0][1] for _, options in used]


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


def arguments(seed):
    """Any (step, total_steps, beta0, min_beta1)."""
    draw = random.Random(seed)
    total, beta0 = draw.randint(1, 10**6), draw.uniform(0, 0.999)
    return draw.randint(0, total), total, beta0, draw.uniform(0, beta0)


@pytest.mark.parametrize("seed", range(50))
def test_until_the_floor_the_lr_falls_linearly_by_beta0_and_the_momentum_as_demon_says(seed):
    step, total, beta0, floor = arguments(seed)
    beta1, lr_factor = momentum_decay(step, total, beta0, floor)
    left = 1 - step / total
    unclipped, linear = momentum_decay(step, total, beta0, min_beta1=0.0)
    assert linear == pytest.approx(1 - beta0 * step / total, rel=0, abs=1e-14)
    assert unclipped / (1 - unclipped) == pytest.approx(left * beta0 / (1 - beta0), rel=1e-10)
    assert beta1 == max(unclipped, floor)
    if unclipped >= floor:
        assert lr_factor == linear


@pytest.mark.parametrize("seed", range(50))
def test_a_new_gradient_enters_the_update_with_the_same_weight_also_at_the_floor(seed):
    step, total, beta0, floor = arguments(seed)
    beta1, lr_factor = momentum_decay(step, total, beta0, floor)
    assert lr_factor * (1 - beta1) == pytest.approx(1 - beta0, rel=1e-14)


@pytest.mark.parametrize("beta0", [0, 0.0, 0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_first_update_is_as_without_and_both_only_fall_and_then_rest(beta0):
    floor = min(beta0, 0.4)
    decays = [momentum_decay(step, 500, beta0, floor) for step in range(1000)]
    assert decays[0] == (beta0, 1.0)
    for before, after in itertools.pairwise(decays):
        assert 0 < after.lr_factor <= before.lr_factor
        assert floor <= after.beta1 <= before.beta1
    assert decays[500:] == [decays[500]] * 500
    assert decays[500].beta1 == floor
    assert all(isinstance(number, float) for number in decays[-1])


def test_the_paper_rests_at_a_third_of_the_lr_for_the_last_sixth_of_the_run():
    factors = [momentum_decay(step, 6000, beta0=0.8).lr_factor for step in range(6000)]
    assert factors[-1] == pytest.approx(1 / 3, rel=1e-15)
    assert factors.count(factors[-1]) == 1000
    assert sum(factors) / 6000 == pytest.approx(0.611, abs=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"total_steps": 0},
        {"total_steps": float("nan")},
        {"total_steps": float("inf")},
        {"min_beta1": 0.9},
        {"min_beta1": -0.1},
        {"beta0": 1.0},
        {"beta0": 0.3},
        {"beta0": float("nan")},
    ],
)
def test_what_the_formula_does_not_cover_is_refused(wrong):
    arguments = {"step": 0, "total_steps": 10, "beta0": 0.8, "min_beta1": 0.4, **wrong}
    with pytest.raises(ValueError, match=f"got .*{next(iter(wrong.values()))}"):
        momentum_decay(**arguments)


# The callback: which options an update uses


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(AdamW, betas=(0.8, 0.99), weight_decay=0.1),
        partial(torch.optim.NAdam, betas=(0.8, 0.99)),
        partial(torch.optim.RAdam, betas=(0.8, 0.99)),
        partial(torch.optim.Adamax, betas=(0.8, 0.99)),
        partial(AdamW, betas=(0.8, 0.99), fused=True),
    ],
    ids=["AdamW", "NAdam", "RAdam", "Adamax", "fused"],
)
def test_training_equals_a_plain_loop_with_the_formula_bit_for_bit(tmp_path, optimizer):
    module = PlainModule(optimizer=optimizer)
    fit(tmp_path, module, MomentumDecay())
    plain = PlainModule(optimizer=optimizer)
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


SCHEDULES = {
    "none": None,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS + 1),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "one cycle": partial(
        lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "chained": chained,
    "warm-up": partial(WarmupConstant, warmup_steps=3),
    "warm-up, cosine": partial(WarmupCosine, warmup_steps=3, total_steps=STEPS + 1),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_with_any_schedule_lr_times_1_minus_beta1_is_as_without_also_after_a_resume(
    tmp_path, schedule
):
    reference = Recorded(schedule=schedule)
    fit(tmp_path, reference)
    whole, first, second = (Recorded(schedule=schedule) for _ in range(3))
    fit(tmp_path, whole, MomentumDecay())
    fit(tmp_path, first, MomentumDecay(STEPS), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    fit(tmp_path, second, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    assert whole.seen == reference.seen  # schedules go on from the optimizer's own lr
    assert first.used + second.used == whole.used
    for step, (lr, beta1) in enumerate(zip(lrs(whole.used), momenta(whole.used), strict=True)):
        own = lrs(reference.used)[step]
        decayed = momentum_decay(step, STEPS, beta0=0.8)
        assert (beta1, lr) == (decayed.beta1, own * decayed.lr_factor)
        assert lr * (1 - beta1) == pytest.approx(own * (1 - 0.8), rel=1e-14)
    assert step == STEPS - 1


@pytest.mark.parametrize("compensate_lr", [True, False])
def test_several_groups_decay_from_their_own_beta1_and_lr(tmp_path, compensate_lr):
    class Groups(Recorded):
        def make_optimizer(self, params):
            groups = [
                {"params": params[:2], "lr": 0.1, "betas": (0.9, 0.99)},
                {"params": params[2:]},
            ]
            return super().make_optimizer(groups)

    module = Groups()
    trainer = fit(tmp_path, module, MomentumDecay(compensate_lr=compensate_lr))
    for step, options in module.used:
        for (lr, beta1), own, beta0 in zip(options, (0.1, 1e-2), (0.9, 0.8), strict=True):
            decayed = momentum_decay(step, STEPS, beta0)
            assert beta1 == decayed.beta1
            assert lr == own * (decayed.lr_factor if compensate_lr else 1)
    assert {k for k in trainer.callback_metrics if "mdlrc" in k} == {
        f"mdlrc/{name}_group{number}" for name in ("beta1", "lr") for number in (0, 1)
    }


def muon(params, lr, momentum):
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr, momentum=momentum)


class Lion(torch.optim.Optimizer):
    """Steps by a sign, so beta1 is no part of their length."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.RMSprop, muon])
def test_demon_decays_the_momentum_of_others_than_adam_and_leaves_the_lr(tmp_path, optimizer):
    module = Recorded(partial(optimizer, momentum=0.9))
    fit(tmp_path, module, MomentumDecay(min_beta1=0.2, compensate_lr=False))
    for step, ((lr, momentum),) in module.used:
        tau = step / STEPS
        assert momentum / (1 - momentum) == pytest.approx((1 - tau) * 9, rel=1e-10)
        assert lr == 1e-2
    assert len(module.used) == STEPS


def test_a_floor_of_0_leaves_an_optimizer_without_momentum_as_it_is(tmp_path):
    plain = PlainModule(optimizer=partial(Adam, betas=(0.0, 0.999)))
    module = PlainModule(optimizer=partial(Adam, betas=(0.0, 0.999)))
    fit(tmp_path, plain)
    fit(tmp_path, module, MomentumDecay(min_beta1=0))
    assert_same_bits(trainable(module), trainable(plain))


def test_after_the_total_both_rest(tmp_path):
    module = Recorded()
    fit(tmp_path, module, MomentumDecay(total_steps=4, min_beta1=0.1))
    assert momenta(module.used)[4:] == [0.1] * 4
    assert lrs(module.used)[4:] == [1e-2 * momentum_decay(4, 4, 0.8, 0.1).lr_factor] * 4


def test_accumulated_batches_are_one_update_and_clipped_gradients_do_not_matter(tmp_path):
    module, whole = Recorded(), loader(48, 8)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-3, "max_epochs": 4}
    fit(tmp_path, module, MomentumDecay(), batches=whole, **options)
    assert [step for step, _ in module.used] == list(range(8))
    assert momenta(module.used) == [momentum_decay(step, 8, 0.8).beta1 for step in range(8)]
    assert {options[0] for _, options in module.seen} == {(1e-2, 0.8)}
    assert len(module.seen) == 24


class Overflows(Recorded):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_step in (0, 2) else loss


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_counts_and_changes_nothing_else(tmp_path, fused):
    module, watch = Overflows(partial(ADAM, fused=fused)), Watch()
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(tmp_path, module, MomentumDecay(), watch, plugins=[scaler])
    made = [(s, options) for s, options in module.used if s not in (0, 2)]
    assert [step for step, _ in made] == [1, 3, 4, 5, 6, 7]
    for step, ((lr, beta1),) in made:
        assert (beta1, lr / 1e-2) == pytest.approx(momentum_decay(step, STEPS, 0.8), rel=1e-15)
    assert_same_bits(watch.history[1], watch.history[0])
    assert_same_bits(watch.history[3], watch.history[2])
    assert {options[0] for _, options in module.seen} == {(1e-2, 0.8)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions_train_with_the_same_options(tmp_path, precision):
    module = Recorded()
    fit(tmp_path, module, MomentumDecay(), precision=precision)
    reference = Recorded()
    fit(tmp_path, reference, MomentumDecay())
    assert module.used == reference.used


def test_an_lr_that_is_a_tensor_is_compensated_and_stays_the_schedulers(tmp_path):
    def with_tensor(params, lr):
        return Adam(params, lr=torch.tensor(lr), betas=(0.8, 0.999), foreach=False)

    schedule = partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS + 1)
    module, reference = Recorded(with_tensor, schedule), Recorded(schedule=schedule)
    trainer = fit(tmp_path, module, MomentumDecay())
    fit(tmp_path, reference, MomentumDecay())
    assert lrs(module.used) == pytest.approx(lrs(reference.used), rel=1e-6)
    assert momenta(module.used) == momenta(reference.used)
    assert isinstance(trainer.optimizers[0].param_groups[0]["lr"], torch.Tensor)


def test_with_ema_both_do_what_they_do_alone(tmp_path):
    both, alone, watch, ema = Recorded(), Recorded(), Watch(), EMA((0.9,))
    fit(tmp_path, both, ema, MomentumDecay(), watch)
    fit(tmp_path, alone, MomentumDecay())
    assert both.used == alone.used
    assert_same_bits(trainable(both), trainable(alone))
    average = watch.average(0.9)
    for name, shadow in ema.state_dict()["shadows"][0].items():
        torch.testing.assert_close(shadow.double(), average[name], rtol=0, atol=1e-6)


# Who sees what between the updates


def test_monitors_log_the_optimizers_own_lr_and_the_callback_what_updates_used(tmp_path):
    module = Recorded(schedule=SCHEDULES["cosine"])
    logger = CSVLogger(tmp_path)
    fit(tmp_path, module, MomentumDecay(), LearningRateMonitor(log_momentum=True), logger=logger)
    rows = (next(tmp_path.glob("**/metrics.csv"))).read_text().split()
    names = rows[0].split(",")
    table = {
        name: [float(row.split(",")[i]) for row in rows[1:] if row.split(",")[i]]
        for i, name in enumerate(names)
    }
    seen = [options[0] for _, options in module.seen]
    assert table["lr-Adam"] == pytest.approx([lr for lr, _ in seen], rel=1e-6)
    assert table["lr-Adam-momentum"] == pytest.approx([0.8] * STEPS, rel=1e-6)
    assert table["mdlrc/lr"] == pytest.approx(lrs(module.used), rel=1e-6)
    assert table["mdlrc/beta1"] == pytest.approx(momenta(module.used), rel=1e-6)


class SavesEverywhere(Recorded):
    """Also in the middle of an update, from a hook of the optimizer and one of Lightning's."""

    def __init__(self, folder):
        super().__init__(schedule=SCHEDULES["cosine"])
        self.folder, self.places = folder, set()

    def save(self, place):
        self.places.add(place)
        self.trainer.save_checkpoint(self.folder / f"{place}-{self.global_step}.ckpt")

    def make_optimizer(self, params):
        optimizer = super().make_optimizer(params)
        optimizer.register_step_post_hook(lambda *_: self.save("update"))
        return optimizer

    def training_step(self, batch, batch_idx):
        self.save("step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.save("before")

    def on_train_batch_end(self, *_):
        self.save("end")


def test_a_checkpoint_from_anywhere_holds_the_optimizers_own_options(tmp_path):
    plain, module = SavesEverywhere(tmp_path / "plain"), SavesEverywhere(tmp_path / "mdlrc")
    fit(tmp_path, plain)
    fit(tmp_path, module, MomentumDecay())
    files = sorted((tmp_path / "plain").iterdir())
    assert len(files) == 4 * STEPS
    for file in files:
        expected, found = (
            torch.load(tmp_path / run / file.name, weights_only=True) for run in ("plain", "mdlrc")
        )
        assert found["lr_schedulers"] == expected["lr_schedulers"]
        (own,), (packed,) = (run["optimizer_states"] for run in (expected, found))
        assert packed["param_groups"] == own["param_groups"]


def test_the_state_is_the_length_and_the_count_as_builtins(tmp_path):
    decay = MomentumDecay()
    assert decay.state_dict() == {}
    fit(tmp_path, Recorded(), decay).save_checkpoint(tmp_path / "c.ckpt")
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"]
    assert stored["MomentumDecay{'optimizers': None}"] == {"total_steps": 8, "steps": [8]}


@pytest.mark.parametrize("where", ["step", "update"])
@pytest.mark.parametrize("first", [True, False])
def test_after_an_exception_the_own_options_are_back_and_the_checkpoint_resumes_exactly(
    tmp_path, where, first
):
    class Fails(Recorded):
        def make_optimizer(self, params):
            optimizer = super().make_optimizer(params)
            optimizer.register_step_post_hook(lambda *_: self.fail("update"))
            return optimizer

        def fail(self, place):
            if self.global_step == 3 and place == where:
                raise ArithmeticError(place)

        def training_step(self, batch, batch_idx):
            self.fail("step")
            return super().training_step(batch, batch_idx)

    class Saves(Callback):
        def on_exception(self, trainer, pl_module, exception):
            trainer.save_checkpoint(tmp_path / "c.ckpt")

    module, decay = Fails(), MomentumDecay()
    with pytest.raises(ArithmeticError):
        fit(tmp_path, module, *([decay, Saves()] if first else [Saves(), decay]))
    optimizer = module.trainer.optimizers[0]
    own = optimizer.param_groups[0]
    assert (own["lr"], own["betas"]) == (1e-2, (0.8, 0.999))
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)
    packed = stored["optimizer_states"][0]["param_groups"][0]
    assert (packed["lr"], packed["betas"]) == (1e-2, (0.8, 0.999))
    assert stored["callbacks"][decay.state_key] == {"total_steps": STEPS, "steps": [3]}


def test_nothing_is_left_on_the_optimizer_after_a_fit(tmp_path):
    trainer = fit(tmp_path, PlainModule(optimizer=ADAM), MomentumDecay())
    (optimizer,) = trainer.optimizers
    for name in ("step_pre", "step_post", "state_dict_post"):
        assert not getattr(optimizer, f"_optimizer_{name}_hooks")


@pytest.mark.parametrize("callback", [MomentumDecay, LRCompensation])
def test_a_run_interrupted_after_any_step_and_resumed_equals_the_whole_one(tmp_path, callback):
    whole = Recorded(schedule=SCHEDULES["warm-up, cosine"])
    saves = ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1)
    end = fit(tmp_path, whole, callback(), saves, enable_checkpointing=True)
    expected = copy.deepcopy(end.optimizers[0].state_dict())
    for step in range(1, STEPS):
        module = Recorded(schedule=SCHEDULES["warm-up, cosine"])
        again = fit(tmp_path, module, callback(), ckpt_path=tmp_path / "c" / f"step={step}.ckpt")
        assert module.used == whole.used[step:]
        assert_same_bits(trainable(module), trainable(whole))
        assert_same_bits(again.optimizers[0].state_dict(), expected)


# The control


@pytest.mark.parametrize(("beta0", "floor"), [(0.8, 0.4), (0.9, 0.0), (0.99, 0.5)])
@pytest.mark.parametrize("schedule", [None, SCHEDULES["warm-up, cosine"], chained])
def test_the_control_has_the_lr_of_every_update_and_constant_momentum(
    tmp_path, schedule, beta0, floor
):
    decayed = Recorded(partial(Adam, betas=(beta0, 0.999)), schedule)
    control = Recorded(partial(Adam, betas=(0.95, 0.999)), schedule)
    fit(tmp_path, decayed, MomentumDecay(min_beta1=floor))
    fit(tmp_path, control, LRCompensation(beta0=beta0, min_beta1=floor))
    assert lrs(control.used) == lrs(decayed.used)
    assert momenta(control.used) == [0.95] * STEPS
    assert len(set(momenta(decayed.used))) > 5


@pytest.mark.parametrize("optimizer", [SGD, partial(SGD, momentum=0.9), torch.optim.Adagrad])
def test_the_control_takes_optimizers_with_any_momentum_or_none(tmp_path, optimizer):
    module = Recorded(optimizer)
    trainer = fit(tmp_path, module, LRCompensation())
    factors = [momentum_decay(step, STEPS, 0.8).lr_factor for step in range(STEPS)]
    assert lrs(module.used) == [1e-2 * factor for factor in factors]
    assert trainer.callback_metrics["mdlrc/lr"].item() == pytest.approx(1e-2 * factors[-1])
    logs_momentum = "mdlrc/beta1" in trainer.callback_metrics
    assert logs_momentum == ("momentum" in trainer.optimizers[0].param_groups[0])


def test_a_control_for_momentum_below_its_floor_is_refused():
    with pytest.raises(ValueError, match="lower min_beta1"):
        LRCompensation(beta0=0.3)


# What is refused at fit start


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (partial(Adam, betas=(0.3, 0.9)), {}, r"0\.4 and 0\.3 \(Adam\); lower min_beta1"),
        (partial(Adam, betas=(0.0, 0.9)), {}, r"0\.4 and 0\.0 \(Adam\); lower min_beta1"),
        (SGD, {}, "momentum of SGD .* compensate_lr=False or use Adam"),
        (SGD, {"compensate_lr": False}, r"0\.4 and 0 \(SGD\)"),
        (partial(SGD, momentum=0.9), {}, "momentum of SGD .* compensate_lr=False or use Adam"),
        (partial(torch.optim.RMSprop, momentum=0.9), {}, "RMSprop .* compensate_lr=False"),
        (
            partial(muon, momentum=0.9),
            {},
            "momentum of Muon enters .* in another way: pass compensate_lr",
        ),
        (Lion, {}, "momentum of Lion enters .* in another way: pass compensate_lr"),
        (type("AdamWScheduleFree", (Adam,), {}), {}, "AdamWScheduleFree is no momentum"),
        (torch.optim.Adagrad, {}, "Adagrad has neither; use Adam"),
        (partial(torch.optim.LBFGS), {"compensate_lr": False}, "LBFGS has neither"),
        (partial(Adam, capturable=True), {}, "pass capturable=False"),
        (ADAM, {"optimizers": [1]}, r"among the 1 of the module, the first being 0, got \[1\]"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(tmp_path, optimizer, arguments, message):
    module = Recorded(optimizer)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, module, MomentumDecay(**arguments))
    assert module.seen == []


def test_momentum_that_a_checkpoint_brings_is_looked_at_too(tmp_path):
    fit(tmp_path, Recorded(partial(Adam, betas=(0.3, 0.9))), max_epochs=3).save_checkpoint(
        tmp_path / "c.ckpt"
    )
    module = Recorded()
    with pytest.raises(ValueError, match=r"0\.4 and 0\.3 \(Adam\)"):
        fit(tmp_path, module, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    assert module.seen == []


@pytest.mark.parametrize(
    "schedule",
    [
        partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=20),
        partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, 0.1, 3),
                lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
            ],
            milestones=[3],
        ),
    ],
    ids=["OneCycleLR", "CyclicLR", "in SequentialLR"],
)
def test_schedules_that_cycle_the_momentum_are_refused_and_the_control_takes_them(
    tmp_path, schedule
):
    with pytest.raises(ValueError, match="pass cycle_momentum=False"):
        fit(tmp_path, Recorded(schedule=schedule), MomentumDecay())
    module = Recorded(schedule=schedule)
    fit(tmp_path, module, LRCompensation())
    assert len(module.used) == STEPS


@pytest.mark.parametrize("min_beta1", [-0.1, 1.0])
def test_a_floor_that_is_no_momentum_is_refused(min_beta1):
    with pytest.raises(ValueError, match="min_beta1 must be in"):
        MomentumDecay(min_beta1=min_beta1)
