import logging
import math
import random
import re
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from support.golden import load
from support.memory_logger import MemoryLogger
from support.plain_module import (
    PlainModule,
    Watch,
    assert_same_bits,
    loader,
    make_trainer,
    trainable,
)
from support.recorded import ADAM, Recorded, TwoRecorded
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.utils.data import IterableDataset

from lit_diffusion.callbacks import LRCompensation, MomentumDecay, StepSeed
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


def test_until_the_floor_the_lr_falls_linearly_by_beta0_and_the_momentum_as_demon_says():
    for step, total, beta0, floor in map(arguments, range(50)):
        beta1, lr_factor = momentum_decay(step, total, beta0, floor)
        left = 1 - step / total
        unclipped, linear = momentum_decay(step, total, beta0, min_beta1=0.0)
        assert linear == pytest.approx(1 - beta0 * step / total, rel=0, abs=1e-14)
        assert unclipped / (1 - unclipped) == pytest.approx(left * beta0 / (1 - beta0), rel=1e-10)
        assert beta1 == max(unclipped, floor)
        assert lr_factor == linear or unclipped < floor
        # a new gradient enters the update with the same weight, also at the floor
        assert lr_factor * (1 - beta1) == pytest.approx(1 - beta0, rel=1e-14)
        assert momentum_decay(0, total, beta0, floor) == (beta0, 1.0)
        last = momentum_decay(total, total, beta0, floor)
        assert momentum_decay(2 * total, total, beta0, floor) == last == (floor, last.lr_factor)


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


# The callback: which options an update uses


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(AdamW, betas=(0.8, 0.99), weight_decay=0.1),
        partial(AdamW, betas=(0.8, 0.99), fused=True),
    ],
    ids=["AdamW", "fused"],
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


COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS + 1)
ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=STEPS + 1)


@pytest.mark.parametrize("schedule", [chained, partial(ONE_CYCLE, cycle_momentum=False)])
def test_with_any_schedule_lr_times_1_minus_beta1_is_as_without_also_after_a_resume(
    tmp_path, schedule
):
    reference = Recorded(schedule=schedule)
    fit(tmp_path, reference)
    whole, first, second = (Recorded(schedule=schedule) for _ in range(3))
    fit(tmp_path, whole, MomentumDecay())
    fit(tmp_path, first, MomentumDecay(STEPS), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    fit(tmp_path, second, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    assert whole.visible == reference.visible  # schedules go on from the optimizer's own lr
    assert first.used + second.used == whole.used
    for step, (lr, beta1) in enumerate(zip(lrs(whole.used), momenta(whole.used), strict=True)):
        base_lr = lrs(reference.used)[step]
        decayed = momentum_decay(step, STEPS, beta0=0.8)
        assert (beta1, lr) == (decayed.beta1, base_lr * decayed.lr_factor)
        assert lr * (1 - beta1) == pytest.approx(base_lr * (1 - 0.8), rel=1e-14)
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
        for (lr, beta1), base_lr, beta0 in zip(options, (0.1, 1e-2), (0.9, 0.8), strict=True):
            decayed = momentum_decay(step, STEPS, beta0)
            assert beta1 == decayed.beta1
            assert lr == base_lr * (decayed.lr_factor if compensate_lr else 1)
    assert {k for k in trainer.callback_metrics if "mdlrc" in k} == {
        f"mdlrc/{name}_group{number}" for name in ("beta1", "lr") for number in (0, 1)
    }


def muon(params, lr):
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """Steps by a sign, so beta1 is no part of their length."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})


def test_demon_decays_the_momentum_of_others_than_adam_and_leaves_the_lr(tmp_path):
    module = Recorded(partial(SGD, momentum=0.9))
    fit(tmp_path, module, MomentumDecay(min_beta1=0.2, compensate_lr=False))
    for step, ((lr, momentum),) in module.used:
        tau = step / STEPS
        assert momentum / (1 - momentum) == pytest.approx((1 - tau) * 9, rel=1e-10)
        assert lr == 1e-2
    assert len(module.used) == STEPS


def test_accumulated_batches_are_one_update_and_clipped_gradients_do_not_matter(tmp_path):
    module, whole = Recorded(), loader(48, 8)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-3, "max_epochs": 4}
    fit(tmp_path, module, MomentumDecay(), batches=whole, **options)
    assert [step for step, _ in module.used] == list(range(8))
    assert momenta(module.used) == [momentum_decay(step, 8, 0.8).beta1 for step in range(8)]
    assert {options[0] for _, options in module.visible} == {(1e-2, 0.8)}
    assert len(module.visible) == 24


class Overflows(Recorded):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_step in (0, 2) else loss


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_counts_and_changes_nothing_else(tmp_path, fused):
    module, watch = Overflows(partial(ADAM, fused=fused)), Watch()
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(tmp_path, module, MomentumDecay(), watch, plugins=[scaler])
    updates = [(s, options) for s, options in module.used if s not in (0, 2)]
    assert [step for step, _ in updates] == [1, 3, 4, 5, 6, 7]
    for step, ((lr, beta1),) in updates:
        assert (beta1, lr / 1e-2) == pytest.approx(momentum_decay(step, STEPS, 0.8), rel=1e-15)
    assert_same_bits(watch.history[1], watch.history[0])
    assert_same_bits(watch.history[3], watch.history[2])
    assert {options[0] for _, options in module.visible} == {(1e-2, 0.8)}


def test_an_lr_that_is_a_tensor_is_compensated_and_stays_the_schedulers(tmp_path):
    def with_tensor(params, lr):
        return Adam(params, lr=torch.tensor(lr), betas=(0.8, 0.999), foreach=False)

    module, reference = Recorded(with_tensor, COSINE), Recorded(schedule=COSINE)
    trainer = fit(tmp_path, module, MomentumDecay())
    fit(tmp_path, reference, MomentumDecay())
    assert lrs(module.used) == pytest.approx(lrs(reference.used), rel=1e-6)
    assert momenta(module.used) == momenta(reference.used)
    assert isinstance(trainer.optimizers[0].param_groups[0]["lr"], torch.Tensor)


# Inside the update


def test_a_step_that_torch_takes_to_initialize_state_is_no_update(tmp_path):
    class Initializes(Recorded):
        def on_train_start(self):
            get_optimizer_state_dict(self, self.trainer.optimizers[0])
            del self.used[:]

    module = Initializes()
    decay = MomentumDecay()
    trainer = make_trainer(tmp_path, decay, max_epochs=2)
    module.trainer = trainer
    trainer.fit(module, loader(8, 8))
    assert momenta(module.used) == [momentum_decay(step, 2, 0.8).beta1 for step in (0, 1)]


def test_an_optimizer_that_reads_options_before_its_closure_uses_those_of_the_update(tmp_path):
    lrs_read = []
    SGD([torch.zeros(1)], lr=1.0)  # from the first one on, hooks run in its step too

    class ReadsFirst(SGD):
        def step(self, closure=None):
            lrs_read.append(self.param_groups[0]["lr"])
            return super().step(closure)

    module = PlainModule(optimizer=ReadsFirst)
    trainer = fit(tmp_path, module, LRCompensation())
    factors = [momentum_decay(step, STEPS, 0.8).lr_factor for step in range(STEPS)]
    assert lrs_read == [1e-2 * factor for factor in factors]
    assert trainer.callback_metrics["mdlrc/lr"].item() == pytest.approx(lrs_read[-1])


# Who sees what between the updates


def test_monitors_log_the_optimizers_own_lr_and_the_callback_what_updates_used(tmp_path):
    module, logger = Recorded(schedule=COSINE), MemoryLogger()
    fit(tmp_path, module, MomentumDecay(), LearningRateMonitor(log_momentum=True), logger=logger)
    visible = [options[0] for _, options in module.visible]
    for name, values in {
        "lr-Adam": [lr for lr, _ in visible],
        "lr-Adam-momentum": [0.8] * STEPS,
        "mdlrc/lr": lrs(module.used),
        "mdlrc/beta1": momenta(module.used),
    }.items():
        assert [value for _, value in logger.of(name)] == pytest.approx(values, rel=1e-6)


def test_the_state_is_the_length_and_the_count_as_builtins(tmp_path):
    decay = MomentumDecay()
    assert decay.state_dict() == {}
    fit(tmp_path, Recorded(), decay).save_checkpoint(tmp_path / "c.ckpt")
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)["callbacks"]
    state = stored["MomentumDecay{'optimizers': None}"]
    assert state.pop("last_values").keys() == {0}
    assert state == {"total_steps": 8, "steps": [8]}


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
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.999))
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    stored = torch.load(tmp_path / "c.ckpt", weights_only=True)
    packed = stored["optimizer_states"][0]["param_groups"][0]
    assert (packed["lr"], packed["betas"]) == (1e-2, (0.8, 0.999))
    assert (
        stored["callbacks"][decay.state_key].items() >= {"total_steps": STEPS, "steps": [3]}.items()
    )


# The control


@pytest.mark.parametrize(
    ("beta0", "floor", "schedule"),
    [(0.8, 0.4, None), (0.9, 0.0, chained)],
)
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


@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), torch.optim.Adagrad])
def test_the_control_takes_optimizers_with_any_momentum_or_none(tmp_path, optimizer):
    module = Recorded(optimizer)
    trainer = fit(tmp_path, module, LRCompensation())
    factors = [momentum_decay(step, STEPS, 0.8).lr_factor for step in range(STEPS)]
    assert lrs(module.used) == [1e-2 * factor for factor in factors]
    assert trainer.callback_metrics["mdlrc/lr"].item() == pytest.approx(1e-2 * factors[-1])
    logs_momentum = "mdlrc/beta1" in trainer.callback_metrics
    assert logs_momentum == ("momentum" in trainer.optimizers[0].param_groups[0])


# What is refused at fit start


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (partial(Adam, betas=(0.3, 0.9)), {}, "min_beta1=0.4 and beta0=0.3, .*lower min_beta1"),
        (SGD, {}, "momentum of SGD .* compensate_lr=False or use Adam"),
        (SGD, {"compensate_lr": False}, "min_beta1=0.4 and beta0=0"),
        (muon, {}, "momentum of Muon .* compensate_lr=False"),
        (Lion, {}, "momentum of Lion enters .* in another way: pass compensate_lr"),
        (type("AdamWScheduleFree", (Adam,), {}), {}, "AdamWScheduleFree has none"),
        (torch.optim.Adagrad, {}, "Adagrad has none; use Adam"),
        (ADAM, {"optimizers": [1]}, r"among the 1 of the module, the first being 0, got \[1\]"),
        (ADAM, {"optimizers": []}, r"among the 1 of the module"),
        (ADAM, {"optimizers": [-1]}, r"among the 1 of the module"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(tmp_path, optimizer, arguments, message):
    module = Recorded(optimizer)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, module, MomentumDecay(**arguments))
    assert module.visible == []


def test_momentum_that_a_checkpoint_brings_is_refused_before_the_first_update(tmp_path):
    fit(tmp_path, Recorded(partial(Adam, betas=(0.3, 0.9))), max_epochs=3).save_checkpoint(
        tmp_path / "c.ckpt"
    )
    module = Recorded()
    with pytest.raises(ValueError, match=r"min_beta1=0\.4 and beta0=0\.3"):
        fit(tmp_path, module, MomentumDecay(), ckpt_path=tmp_path / "c.ckpt")
    assert module.used == []


@pytest.mark.parametrize(
    "schedule",
    [
        ONE_CYCLE,
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), ONE_CYCLE(optimizer)], milestones=[3]
        ),
    ],
    ids=["OneCycleLR", "in SequentialLR"],
)
def test_schedules_that_cycle_the_momentum_are_refused_and_the_control_takes_them(
    tmp_path, schedule
):
    with pytest.raises(ValueError, match="pass cycle_momentum=False"):
        fit(tmp_path, Recorded(schedule=schedule), MomentumDecay())
    module = Recorded(schedule=schedule)
    fit(tmp_path, module, LRCompensation())
    assert len(module.used) == STEPS


# The length of the schedule


def expected(steps, total, beta0=0.8, floor=0.4):
    """(lr, beta1) of the updates after so many steps."""
    decays = [momentum_decay(step, total, beta0, floor) for step in steps]
    return [(1e-2 * lr_factor, beta1) for beta1, lr_factor in decays]


def first_group(module):
    return [options[0] for _, options in module.used]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield [torch.ones(4)]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Recorded, {"max_epochs": -1}),
        (Recorded, {"batches": torch.utils.data.DataLoader(Endless(), 8)}),
        (TwoRecorded, {}),
    ],
    ids=["no limit", "endless data", "manual optimization"],
)
def test_an_unknown_length_is_refused_before_the_first_step(tmp_path, module, options):
    module = module()
    with pytest.raises(ValueError, match=r"unknown for Trainer.*; pass total_steps"):
        fit(tmp_path, module, MomentumDecay(), **options)
    assert module.visible == []


@pytest.fixture
def checkpoint(tmp_path):
    """After 3 of 8 steps."""
    trainer = fit(tmp_path, Recorded(), MomentumDecay(STEPS), max_epochs=3)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    return tmp_path / "c.ckpt"


def resume(folder, checkpoint, decay, **options):
    module = Recorded()
    fit(folder, module, decay, ckpt_path=checkpoint, **options)
    return first_group(module)


def test_on_resume_an_explicit_total_wins_and_the_change_is_printed(tmp_path, checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        updates = resume(tmp_path, checkpoint, MomentumDecay(total_steps=20))
    assert "MomentumDecay total_steps: the checkpoint has 8, this run 20, using 20." in caplog.text
    assert updates == expected(range(3, 8), 20)


def test_on_resume_none_keeps_the_length_of_the_checkpoint_and_warns_of_another(
    tmp_path, checkpoint
):
    with pytest.warns(UserWarning, match=r"has 8, this run 12, using 8\. Pass total_steps"):
        updates = resume(tmp_path, checkpoint, MomentumDecay(), max_epochs=12)
    assert updates == expected(range(3, 12), 8)

    class Stops(Recorded):
        def on_train_batch_end(self, *_):
            self.trainer.should_stop = self.global_step == STEPS

    module = Stops()
    with pytest.warns(UserWarning, match="this run no known number, using 8"):
        fit(tmp_path, module, MomentumDecay(), ckpt_path=checkpoint, max_epochs=-1)
    assert first_group(module) == expected(range(3, 8), 8)


class SavesFirst(Recorded):
    def on_fit_start(self):
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/early.ckpt")


def test_the_length_goes_on_through_several_resumes_and_saves_before_the_first_step(
    tmp_path, checkpoint
):
    decay = MomentumDecay()
    with pytest.warns(UserWarning, match="has 8, this run 4"):
        fit(tmp_path, SavesFirst(), decay, ckpt_path=checkpoint, max_epochs=4)
    early = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"]
    assert early[decay.state_key].items() >= {"total_steps": 8, "steps": [3]}.items()
    assert decay.state_dict().items() >= {"total_steps": 8, "steps": [4]}.items()


def test_a_callback_can_serve_another_run_and_keeps_nothing_of_the_last(tmp_path):
    module, decay = SavesFirst(), MomentumDecay()
    fit(tmp_path, Recorded(), decay)
    fit(tmp_path, module, decay, max_epochs=3)
    assert first_group(module) == expected(range(3), 3)
    early = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"]
    assert not early.get(decay.state_key)


def test_a_run_without_the_callback_goes_on_with_it_where_the_schedule_would_be(tmp_path):
    fit(tmp_path, Recorded(), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    assert resume(tmp_path, tmp_path / "c.ckpt", MomentumDecay()) == expected(range(3, 8), 8)


def test_a_second_fit_of_one_trainer_goes_on(tmp_path):
    module, decay = Recorded(), MomentumDecay(total_steps=STEPS)
    trainer = fit(tmp_path, module, decay, max_epochs=5)
    trainer.fit_loop.max_epochs = STEPS
    trainer.fit(module, loader(8, 8))
    assert first_group(module) == expected(range(8), 8)


def test_data_is_read_as_often_as_without(tmp_path):
    """A loader whose place in the data is restored must not be asked before that."""

    class Counted(torch.utils.data.DataLoader):
        count = 0

        def __iter__(self):
            self.count += 1
            return super().__iter__()

    def count_iterations(*callbacks):
        batches = Counted(loader(32, 8).dataset, batch_size=8)
        fit(tmp_path, Recorded(), *callbacks, batches=batches, max_epochs=2)
        return batches.count

    assert count_iterations(MomentumDecay()) == count_iterations()


# Several optimizers


@pytest.mark.parametrize(("which", "decays"), [(None, (True, True)), ([1], (False, True))])
def test_each_chosen_optimizer_decays_with_its_own_steps(tmp_path, which, decays):
    module = TwoRecorded()
    trainer = fit(tmp_path, module, MomentumDecay(total_steps=8, optimizers=which))
    for used, count, decay in zip(module.used.values(), (8, 4), decays, strict=True):
        assert used == (expected(range(count), 8) if decay else [(1e-2, 0.8)] * count)
    logged = {name for name in trainer.callback_metrics if "mdlrc" in name}
    assert logged == {
        f"mdlrc/{name}_optimizer{i}" for i in (0, 1) if decays[i] for name in ("beta1", "lr")
    }


def test_two_callbacks_may_serve_an_optimizer_each_and_never_one_together(tmp_path):
    module = TwoRecorded()
    first, second = (MomentumDecay(total, optimizers=[i]) for i, total in enumerate((8, 4)))
    fit(tmp_path, module, first, second)
    assert module.used["often"] == expected(range(8), 8)
    assert module.used["seldom"] == expected(range(4), 4)
    control = LRCompensation(4, beta0=0.8, optimizers=[1])
    lr = [lr for lr, _ in module.used["seldom"]]
    module = TwoRecorded()
    fit(tmp_path, module, MomentumDecay(8, optimizers=[0]), control)
    assert module.used["often"] == expected(range(8), 8)
    assert module.used["seldom"] == [(value, 0.8) for value in lr]
    with pytest.raises(ValueError, match="MomentumDecay and LRCompensation would both change opt"):
        fit(tmp_path, Recorded(), MomentumDecay(), LRCompensation())


def test_counts_of_two_optimizers_resume_exactly_after_any_batch(tmp_path):
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = TwoRecorded()
    fit(tmp_path, whole, MomentumDecay(total_steps=8), saves, enable_checkpointing=True)
    for epoch in (0, 3):
        module, saved = TwoRecorded(), tmp_path / f"epoch={epoch}.ckpt"
        fit(tmp_path, module, MomentumDecay(total_steps=8), ckpt_path=saved)
        assert module.used["often"] == whole.used["often"][epoch + 1 :]
        assert module.used["seldom"] == whole.used["seldom"][epoch // 2 + 1 :]
        assert_same_bits(trainable(module), trainable(whole))


def test_a_step_that_the_grad_scaler_skips_counts_as_it_does_in_global_step(tmp_path):
    class Overflows(TwoRecorded):
        def loss(self, batch):
            return super().loss(batch) * (torch.inf if self.current_epoch == 2 else 1)

    class Counts(Callback):
        def on_train_batch_end(self, trainer, *args):
            completed.append(decay.state_dict()["steps"])
            assert sum(completed[-1]) == trainer.global_step

    module, decay, completed = Overflows(), MomentumDecay(total_steps=8), []
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    fit(tmp_path, module, Counts(), decay, plugins=[scaler], max_epochs=6)
    assert completed == [[1, 1], [2, 1], [3, 2], [4, 2], [5, 3], [6, 3]]
    assert [len(used) for used in module.used.values()] == [5, 2]


@pytest.mark.parametrize("steps", [None, [5], [3, 2, 0], [3, 3], [2, 2]])
def test_counts_that_are_missing_or_not_those_of_the_run_are_refused(tmp_path, steps):
    decay = MomentumDecay(total_steps=8)
    fit(tmp_path, TwoRecorded(), decay, max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert state["callbacks"][decay.state_key]["steps"] == [3, 2]
    state["callbacks"][decay.state_key] |= {"steps": steps}
    if steps is None:
        del state["callbacks"][decay.state_key]
    torch.save(state, tmp_path / "c.ckpt")
    message = rf"each of 2 optimizers .* has {re.escape(str(steps or 'only their sum'))} \(5\)"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, TwoRecorded(), MomentumDecay(8), ckpt_path=tmp_path / "c.ckpt")


# Accidents


class Wrapped:
    """An optimizer as DeepSpeed wraps it."""

    def __init__(self, params, lr):
        self.inside = Adam(params, lr)
        self.param_groups, self.defaults = self.inside.param_groups, self.inside.defaults
        self.state, self.state_dict = self.inside.state, self.inside.state_dict
        self.load_state_dict, self.zero_grad = self.inside.load_state_dict, self.inside.zero_grad

    def step(self, closure=None):
        return self.inside.step(closure)


def test_a_wrapped_optimizer_is_refused_before_the_first_step(tmp_path):
    module = PlainModule(optimizer=Wrapped)
    with pytest.raises(ValueError, match="Wrapped is something else, or has not"):
        fit(tmp_path, module, LRCompensation())
    assert module.losses == []


def test_steps_that_lightning_does_not_count_are_named(tmp_path):
    class Module(PlainModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"Lightning counts no step; step what self\.optimizers"):
        fit(tmp_path, Module(optimizer=ADAM), MomentumDecay(total_steps=8))


def test_a_search_for_the_lr_is_not_disturbed_and_leaves_no_trace(tmp_path):
    class Tuned(Recorded):
        def train_dataloader(self):
            return loader(8, 8)

    def run(*callbacks):
        module, finder = Tuned(), LearningRateFinder(num_training_steps=4)
        make_trainer(tmp_path, StepSeed(0), *callbacks, finder, max_epochs=STEPS).fit(module)
        return module, finder.optimal_lr.results["lr"]

    (module, tried), (plain, tried_without) = run(MomentumDecay()), run()
    assert tried == tried_without
    in_search = len(module.used) - STEPS
    assert module.used[:in_search] == plain.used[:in_search]
    assert [beta1 for _, ((_, beta1),) in module.used[in_search:]] == [
        beta1 for _, beta1 in expected(range(8), 8)
    ]


def test_a_state_that_was_not_saved_by_it_is_refused():
    MomentumDecay().load_state_dict({"total_steps": 9, "steps": [1, 0]})
    for total, steps in ((0, [1]), ("9", [1]), (9, [-1]), (9, 1)):
        with pytest.raises(ValueError, match="is damaged: total_steps must be 1 or more"):
            MomentumDecay().load_state_dict({"total_steps": total, "steps": steps})
    for values in ([1.0], {0: 1.0}, {0: [{"lr": "high"}]}):
        with pytest.raises(ValueError, match="is damaged"):
            MomentumDecay().load_state_dict({"total_steps": 9, "last_values": values})
