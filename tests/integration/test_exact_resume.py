"""A run that dies at any step and is resumed ends as if it had never died, to the last bit."""

import pytest
from support.resuming import (
    ALTERNATIVES,
    CALLBACKS,
    STEPS,
    Recipe,
    assert_undisturbed,
    resume_on_two_ranks,
)
from support.spawn import spawn

from lit_diffusion import callbacks

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS - 2))
def test_died_at_any_step(tmp_path, step):
    assert_undisturbed(tmp_path, Recipe(), step)


@pytest.mark.quick("1")
@pytest.mark.parametrize("step", [1, 4, 5, 10])
def test_died_as_soon_as_the_checkpoint_was_there(tmp_path, step):
    """The row of its step is logged by Lightning only afterwards."""
    recipe = Recipe(trainer=(("max_steps", step + 2), ("limit_val_batches", 1)))
    assert_undisturbed(tmp_path, recipe, step, at_once=True)


def test_no_callback_is_left_out():
    """But the one that ends runs, of which tests/callbacks/test_save_on_signal.py is."""
    assert {*CALLBACKS, *ALTERNATIVES} == {*callbacks.__all__} - {"SaveOnSignal"}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.rare) for name in CALLBACKS),  # together below
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALTERNATIVES),
    ],
)
def test_died_with_any_callback(tmp_path, name):
    assert_undisturbed(tmp_path, Recipe((name,)), 7)


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 8])
def test_died_with_callbacks_together(tmp_path, step):
    assert_undisturbed(tmp_path, Recipe(tuple(CALLBACKS)), step)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
def test_died_with_loading_processes(tmp_path, workers):
    assert_undisturbed(tmp_path, Recipe(workers=workers), 7)


IN_PAIRS = Recipe(trainer=(("accumulate_grad_batches", 2),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "batches"),
    [
        # Five batches an epoch are steps of two, two and one: 1, 3, 6 and 8 are no place to save.
        (IN_PAIRS, (1, 3, 5, 6)),
        (Recipe(accumulates_itself=True), (1, 5, 6)),
        (Recipe(("GradientAccumulationScheduler",)), (7, 8)),
    ],
    ids=["by the trainer", "by the module", "more in later epochs"],
)
def test_died_between_accumulated_batches(tmp_path, recipe, batches):
    for batch in batches:
        assert_undisturbed(tmp_path / str(batch), recipe, batch)


EVERY_TWO = ("val_check_interval", 2)
EVERY_THREE = (("val_check_interval", 3), ("check_val_every_n_epoch", None))
SETTINGS = [  # an epoch ends after step 5
    (4, (EVERY_TWO,)),
    (6, (EVERY_TWO,)),
    (5, EVERY_THREE),
    (6, EVERY_THREE),
    (4, (("limit_train_batches", 3),)),
    (6, (("overfit_batches", 4),)),
    (5, (("limit_val_batches", 0),)),
    (5, (("max_epochs", 3), ("max_steps", -1))),
    (6, (("gradient_clip_val", 0.1), ("precision", "bf16-mixed"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "trainer"), SETTINGS)
def test_died_under_settings_of_the_trainer(tmp_path, trainer, step):
    assert_undisturbed(tmp_path, Recipe(trainer=trainer), step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_died_in_epochs_of_one_step(tmp_path, step):
    trainer = ("accumulate_grad_batches", 5), ("max_steps", 5), ("check_val_every_n_epoch", 2)
    assert_undisturbed(tmp_path, Recipe(("EMA", "StepSeed"), trainer=trainer), 5 * step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "step", "trainer"),
    [
        ("plateau of epochs", 7, ()),
        ("plateau of epochs", 6, (("check_val_every_n_epoch", 2),)),
        ("plateau of two epochs", 6, (("check_val_every_n_epoch", 2),)),
        ("plateau of steps", 4, (EVERY_TWO,)),
        ("plateau of steps", 3, (EVERY_TWO, ("accumulate_grad_batches", 2))),
        ("plateau of training", 3, (EVERY_TWO, ("accumulate_grad_batches", 2))),
        ("steps of epochs", 4, (EVERY_TWO,)),
    ],
)
def test_died_with_schedules_that_lightning_updates_after_saves(tmp_path, schedule, step, trainer):
    assert_undisturbed(tmp_path, Recipe((), schedule=schedule, trainer=trainer), step)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "workers"), [(3, 0), (8, 2)])
def test_died_on_two_ranks(tmp_path, batch, workers):
    spawn(resume_on_two_ranks, 2, tmp_path, batch, workers)
