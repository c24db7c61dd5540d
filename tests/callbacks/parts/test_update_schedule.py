"""What MomentumDecay and LRCompensation share: lengths, counts, logs, conflicts."""

import json
import logging
import math
import re
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from support.on_ranks import run_on_ranks
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer, trainable
from support.recorded import ADAM, Recorded, TwoRecorded
from torch.optim import Adam, lr_scheduler
from torch.utils.data import IterableDataset

from lit_diffusion.callbacks import LRCompensation, MomentumDecay, StepSeed
from lit_diffusion.callbacks.momentum_decay import momentum_decay

STEPS = 8


def fit(folder, module, *callbacks, ckpt_path=None, batches=None, **options):
    """Eight steps, each an epoch of one batch."""
    options = {"max_epochs": STEPS, "log_every_n_steps": 1, **options}
    trainer = make_trainer(folder, StepSeed(0), *callbacks, **options)
    trainer.fit(module, loader(8, 8) if batches is None else batches, ckpt_path=ckpt_path)
    return trainer


def expected(steps, total, beta0=0.8, floor=0.4):
    """(lr, beta1) of the updates after so many steps."""
    decays = [momentum_decay(step, total, beta0, floor) for step in steps]
    return [(1e-2 * lr_factor, beta1) for beta1, lr_factor in decays]


def used(module):
    return [options[0] for _, options in module.used]


# The length of the schedule


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"max_epochs": 5}, 5),
        ({"max_epochs": -1, "max_steps": 6}, 6),
        ({"max_epochs": 9, "max_steps": 3}, 3),
        ({"max_epochs": 3, "batches": loader(40, 8), "accumulate_grad_batches": 2}, 9),
        ({"max_epochs": 3, "batches": loader(40, 8), "limit_train_batches": 2}, 6),
    ],
)
def test_without_total_steps_the_length_is_the_trainers(tmp_path, options, total):
    module = Recorded()
    fit(tmp_path, module, MomentumDecay(), **options)
    assert used(module) == expected(range(total), total)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield [torch.ones(4)]


@pytest.mark.parametrize("callback", [MomentumDecay, LRCompensation])
def test_an_unknown_length_is_refused_before_the_first_step(tmp_path, callback):
    unknown = [
        ({"max_epochs": -1}, r"max_steps=-1, max_epochs=-1\) knows none; pass total_steps"),
        ({"batches": torch.utils.data.DataLoader(Endless(), 8)}, "max_epochs=8. knows none"),
    ]
    for options, message in unknown:
        module = Recorded()
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, module, callback(), **options)
        assert module.seen == []
    with pytest.raises(ValueError, match="manual optimization knows none"):
        fit(tmp_path, TwoRecorded(), callback())


@pytest.mark.parametrize(
    ("scheduling", "options", "total"),
    [
        ({0: 4}, {"max_epochs": 4}, 8),
        ({0: 1, 1: 2, 3: 9}, {"max_epochs": 4}, 5 + 3 + 3 + 1),
        ({2: 2}, {"max_epochs": 3}, 5 + 5 + 3),
        ({0: 1, 1: 2}, {"max_epochs": 4, "max_steps": 7}, 7),
        ({0: 1, 1: 2}, {"max_epochs": -1, "max_steps": 7}, 7),
    ],
)
def test_accumulation_that_changes_with_the_epochs_is_counted(tmp_path, scheduling, options, total):
    module, uneven = Recorded(), GradientAccumulationScheduler(scheduling)
    trainer = fit(tmp_path, module, MomentumDecay(), uneven, batches=loader(40, 8), **options)
    assert trainer.global_step == total
    assert used(module) == expected(range(total), total)


@pytest.mark.parametrize("total_steps", [0, -5, math.nan, math.inf])
def test_a_length_that_is_none_is_refused(total_steps):
    with pytest.raises(ValueError, match=f"got {total_steps}"):
        MomentumDecay(total_steps=total_steps)


@pytest.fixture
def checkpoint(tmp_path):
    """After 3 of 8 steps."""
    module, saves = Recorded(), ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    fit(tmp_path, module, MomentumDecay(), saves, enable_checkpointing=True)
    return tmp_path / "step=3.ckpt"


def resume(folder, checkpoint, decay, **options):
    module = Recorded()
    fit(folder, module, decay, ckpt_path=checkpoint, **options)
    return used(module)


def test_on_resume_an_explicit_total_wins_and_the_change_is_printed(tmp_path, checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        found = resume(tmp_path, checkpoint, MomentumDecay(total_steps=20))
    assert "MomentumDecay total_steps: the checkpoint had 8, using 20." in caplog.text
    assert found == expected(range(3, 8), 20)


def test_on_resume_none_keeps_the_length_of_the_checkpoint_and_warns_of_another(
    tmp_path, checkpoint
):
    message = r"keeps the 8 steps of the checkpoint, while this run has 12; pass total_steps"
    with pytest.warns(UserWarning, match=message):
        found = resume(tmp_path, checkpoint, MomentumDecay(), max_epochs=12)
    assert found == expected(range(3, 12), 8)

    class Stops(Recorded):
        def on_train_batch_end(self, *_):
            self.trainer.should_stop = self.global_step == STEPS

    module = Stops()
    with pytest.warns(UserWarning, match="while this run has no known number"):
        fit(tmp_path, module, MomentumDecay(), ckpt_path=checkpoint, max_epochs=-1)
    assert used(module) == expected(range(3, 8), 8)


@pytest.mark.parametrize("total_steps", [None, STEPS])
def test_a_resume_with_the_same_length_is_silent(tmp_path, checkpoint, caplog, total_steps):
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.filterwarnings("error", message=".*MomentumDecay.*")
        resume(tmp_path, checkpoint, MomentumDecay(total_steps))
    assert "MomentumDecay" not in caplog.text


def test_the_length_goes_on_through_several_resumes_and_saves_before_the_first_step(
    tmp_path, checkpoint
):
    class SavesFirst(PlainModule):
        def on_fit_start(self):
            self.trainer.save_checkpoint(tmp_path / "early.ckpt")

    decay = MomentumDecay()
    with pytest.warns(UserWarning, match="keeps the 8 steps"):
        fit(tmp_path, SavesFirst(optimizer=ADAM), decay, ckpt_path=checkpoint, max_epochs=4)
    early = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"]
    assert early[decay.state_key] == {"total_steps": 8, "steps": [3]}
    assert decay.state_dict() == {"total_steps": 8, "steps": [4]}


def test_a_callback_can_serve_another_run_and_keeps_nothing_of_the_last(tmp_path):
    class SavesFirst(Recorded):
        def on_fit_start(self):
            self.trainer.save_checkpoint(tmp_path / "early.ckpt")

    module, decay = SavesFirst(), MomentumDecay()
    fit(tmp_path, Recorded(), decay)
    fit(tmp_path, module, decay, max_epochs=3)
    assert used(module) == expected(range(3), 3)
    early = torch.load(tmp_path / "early.ckpt", weights_only=True)["callbacks"]
    assert not early.get(decay.state_key)


def test_a_checkpoint_that_was_only_validated_says_nothing_of_the_next_run(tmp_path, checkpoint):
    module, decay = Recorded(), MomentumDecay()
    trainer = make_trainer(tmp_path, decay)
    trainer.validate(module, loader(8, 8), ckpt_path=checkpoint, verbose=False)
    fit(tmp_path, module, decay, max_epochs=3)
    assert used(module) == expected(range(3), 3)


def test_a_run_without_the_callback_goes_on_with_it_where_the_schedule_would_be(tmp_path):
    fit(tmp_path, Recorded(), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    assert resume(tmp_path, tmp_path / "c.ckpt", MomentumDecay()) == expected(range(3, 8), 8)


def test_a_second_fit_of_one_trainer_goes_on(tmp_path):
    module, decay = Recorded(), MomentumDecay(total_steps=STEPS)
    trainer = fit(tmp_path, module, decay, max_epochs=5)
    trainer.fit_loop.max_epochs = STEPS
    trainer.fit(module, loader(8, 8))
    assert used(module) == expected(range(8), 8)


def test_data_is_read_as_often_as_without(tmp_path):
    """A loader whose place in the data is restored must not be asked before that."""

    class Counted(torch.utils.data.DataLoader):
        asked = 0

        def __iter__(self):
            self.asked += 1
            return super().__iter__()

    def asked(*callbacks):
        batches = Counted(loader(32, 8).dataset, batch_size=8)
        fit(tmp_path, Recorded(), *callbacks, batches=batches, max_epochs=2)
        return batches.asked

    assert asked(MomentumDecay()) == asked()


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
    for epoch in range(STEPS - 1):
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


def test_counts_that_a_checkpoint_lacks_are_missed(tmp_path):
    fit(tmp_path, TwoRecorded(), max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match=r"each of 2 optimizers .* has only their sum \(5\)"):
        fit(tmp_path, TwoRecorded(), MomentumDecay(total_steps=8), ckpt_path=tmp_path / "c.ckpt")


@pytest.mark.parametrize("steps", [[5], [3, 2, 0], [3, 3], [2, 2]])
def test_counts_that_are_not_those_of_the_run_are_refused(tmp_path, steps):
    decay = MomentumDecay(total_steps=8)
    fit(tmp_path, TwoRecorded(), decay, max_epochs=3).save_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert state["callbacks"][decay.state_key]["steps"] == [3, 2]
    state["callbacks"][decay.state_key]["steps"] = steps
    torch.save(state, tmp_path / "c.ckpt")
    message = rf"each of 2 optimizers .* has {re.escape(str(steps))} \(5\)"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, TwoRecorded(), MomentumDecay(8), ckpt_path=tmp_path / "c.ckpt")


@pytest.mark.parametrize("optimizers", [[], [-1], [0, 0]])
def test_positions_that_are_none_or_not_distinct_are_refused(optimizers):
    with pytest.raises(ValueError, match="optimizers must be positions"):
        MomentumDecay(optimizers=optimizers)


# Logs and warnings


def test_logs_are_as_frequent_as_lightnings(tmp_path):
    fit(tmp_path, Recorded(), MomentumDecay(), logger=CSVLogger(tmp_path), log_every_n_steps=3)
    header, *rows = (next(tmp_path.glob("**/metrics.csv"))).read_text().split()
    column = header.split(",").index("mdlrc/lr")
    assert [float(row.split(",")[column]) for row in rows] == pytest.approx(
        [lr for lr, _ in expected((2, 5), 8)], rel=1e-6
    )


def test_two_optimizers_that_step_at_their_own_pace_are_logged_when_lightning_logs(tmp_path):
    decay = MomentumDecay(total_steps=8)
    fit(tmp_path, TwoRecorded(), decay, logger=CSVLogger(tmp_path), log_every_n_steps=4)
    header, *rows = (next(tmp_path.glob("**/metrics.csv"))).read_text().split()
    for name, steps in (("optimizer0", (3, 7)), ("optimizer1", (1, 3))):
        column = header.split(",").index(f"mdlrc/lr_{name}")
        assert [float(row.split(",")[column]) for row in rows] == pytest.approx(
            [lr for lr, _ in expected(steps, 8)], rel=1e-6
        )


def test_a_trainer_that_never_logs_trains_the_same(tmp_path):
    module = Recorded()
    trainer = fit(tmp_path, module, MomentumDecay(), log_every_n_steps=0)
    assert used(module) == expected(range(8), 8)
    assert not any("mdlrc" in name for name in trainer.callback_metrics)


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


@pytest.mark.parametrize("callback", [MomentumDecay, LRCompensation])
def test_a_wrapped_optimizer_is_refused_before_the_first_step(tmp_path, callback):
    module = PlainModule(optimizer=Wrapped)
    with pytest.raises(ValueError, match="followed; Wrapped is something else, or has not"):
        fit(tmp_path, module, callback())
    assert module.losses == []


class Hides(PlainModule):
    """Steps an optimizer that Lightning does not know of."""

    def configure_optimizers(self):
        self.inside = Adam(self.parameters(), lr=1e-2)
        return Adam(self.parameters(), lr=1e-2)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.inside.step(closure)


def test_a_run_whose_steps_were_all_hidden_ends_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="changed nothing: it saw none of the 8 steps of Adam"):
        fit(tmp_path, Hides(), MomentumDecay())


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


# Several processes


@pytest.mark.system
def test_two_ranks_use_the_same_options_and_end_with_the_same_weights(tmp_path):
    zero, one = run_on_ranks("mdlrc_on_ranks.py", tmp_path)
    assert zero["losses"] != one["losses"]
    assert zero["weights"] == one["weights"]
    assert zero["used"] == one["used"]
    alone = Recorded(schedule=partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS))
    fit(tmp_path, alone, MomentumDecay())
    assert zero["used"] == json.loads(json.dumps(alone.used))
    assert {tuple(options[0]) for _, options in zero["seen"][:2]} == {(1e-2, 0.8)}


@pytest.mark.parametrize(
    "state",
    [
        {"total_steps": 0, "steps": [1]},
        {"total_steps": "9", "steps": [1]},
        {"total_steps": 9, "steps": [-1]},
        {"total_steps": 9, "steps": 1},
        {"total_steps": 9, "steps": [1.5]},
    ],
)
def test_a_state_that_was_not_saved_by_it_is_refused(state):
    MomentumDecay().load_state_dict({"total_steps": 9, "steps": [1, 0]})
    with pytest.raises(ValueError, match="state of MomentumDecay is damaged: total_steps must be"):
        MomentumDecay().load_state_dict(state)
