"""A run that dies at any step and is resumed ends as if it had never died, to the last bit."""

import pytest
from support.resuming import (
    ALTERNATIVES,
    CALLBACKS,
    SCHEDULES,
    STEPS,
    Recipe,
    assert_undisturbed,
    resume_on_two_ranks,
)
from support.spawn import spawn

from lit_diffusion import callbacks

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.quick("3")
@pytest.mark.parametrize("step", range(1, STEPS - 2))
def test_died_at_any_step(tmp_path, step):
    assert_undisturbed(tmp_path, Recipe(), step)


@pytest.mark.quick("5")
@pytest.mark.parametrize("step", range(1, STEPS - 1))
def test_died_as_soon_as_the_checkpoint_was_there(tmp_path, step):
    """The row of its step is logged by Lightning only afterwards."""
    assert_undisturbed(tmp_path, Recipe(), step, at_once=True)


def test_no_callback_is_left_out():
    """But the one that ends runs, of which tests/callbacks/test_save_on_signal.py is."""
    assert {*CALLBACKS, *ALTERNATIVES} == {*callbacks.__all__} - {"SaveOnSignal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLBACKS, *ALTERNATIVES])
def test_died_with_any_callback(tmp_path, name):
    assert_undisturbed(tmp_path, Recipe((name,)), 7)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5, 8])
def test_died_with_callbacks_together(tmp_path, step):
    assert_undisturbed(tmp_path, Recipe(tuple(CALLBACKS)), step)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(2, 2), (0, 2), (2, 0)])
def test_died_with_loading_processes(tmp_path, workers):
    assert_undisturbed(tmp_path, Recipe(workers=workers), 7)


@pytest.mark.quick("3")
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6, 8])
def test_died_between_accumulated_batches(tmp_path, batch):
    """Five batches an epoch are steps of two, two and one: 1, 3, 6 and 8 are no place to save."""
    assert_undisturbed(tmp_path, Recipe(trainer=(("accumulate_grad_batches", 2),)), batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 5, 6])
def test_died_between_batches_that_the_module_accumulates(tmp_path, batch):
    assert_undisturbed(tmp_path, Recipe(accumulates_itself=True), batch)


@pytest.mark.parametrize(
    "trainer",
    [
        (("val_check_interval", 2),),
        (("val_check_interval", 3), ("check_val_every_n_epoch", None)),
        (("limit_train_batches", 3),),
        (("overfit_batches", 4),),
        (("limit_val_batches", 0),),
        (("max_epochs", 3), ("max_steps", -1)),
        (("gradient_clip_val", 0.1), ("precision", "bf16-mixed")),
    ],
    ids=lambda trainer: "+".join(name for name, _ in trainer),
)
@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 5, 6])
def test_died_under_settings_of_the_trainer(tmp_path, trainer, step):
    assert_undisturbed(tmp_path, Recipe(trainer=trainer), step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 7, 8, 9])
def test_died_in_an_epoch_that_accumulates_more_than_the_first(tmp_path, step):
    recipe = Recipe(("GradientAccumulationScheduler",))
    assert_undisturbed(tmp_path, recipe, step)


@pytest.mark.quick("death0-plateau of epochs")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "death",
    [
        (7, ()),
        (4, (("val_check_interval", 2),)),
        (3, (("val_check_interval", 2), ("accumulate_grad_batches", 2))),
        (6, (("check_val_every_n_epoch", 2),)),
    ],
)
def test_died_with_schedules_that_lightning_updates_after_saves(tmp_path, schedule, death):
    step, trainer = death
    recipe = Recipe((), schedule=schedule, trainer=trainer)
    assert_undisturbed(tmp_path, recipe, step)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "workers"), [(3, 0), (5, 0), (8, 0), (8, 2)])
def test_died_on_two_ranks(tmp_path, batch, workers):
    spawn(resume_on_two_ranks, 2, tmp_path, batch, workers)
