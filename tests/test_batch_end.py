import pytest
from lightning.pytorch import Callback
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion import batch_end

FUNCTIONS = ("accumulates", "validation_follows", "is_ending", "row_is_to_come")


class Asks(Callback):
    """What each function says, by the number of the batch."""

    def __init__(self, hook):
        self.said = {name: [] for name in FUNCTIONS}
        self.batches = 0
        setattr(self, hook, self._ask)

    def _ask(self, trainer, *args):
        self.batches += 1
        for name in FUNCTIONS:
            if getattr(batch_end, name)(trainer):
                self.said[name].append(self.batches)


def said(tmp_path, hook="on_train_batch_end", **options):
    """Of two epochs of five batches."""
    asks = Asks(hook)
    trainer = make_trainer(tmp_path, asks, **{"max_epochs": 2, **options})
    trainer.fit(PlainModule(), loader(40), loader(16))
    return asks.said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ([], [5, 10], [10])),
        ({"accumulate_grad_batches": 2}, ([1, 3, 6, 8], [5, 10], [10])),
        ({"val_check_interval": 2}, ([], [2, 4, 7, 9], [10])),
        ({"limit_val_batches": 0, "max_epochs": -1, "max_steps": 7}, ([], [], [7])),
        ({"check_val_every_n_epoch": 2}, ([], [10], [10])),
    ],
)
def test_batches_whose_gradients_wait_that_validation_follows_and_that_are_the_last(
    tmp_path, options, expected
):
    assert tuple(said(tmp_path, **options).values())[:3] == expected


def test_the_row_of_a_step_is_to_come_at_the_end_of_its_batch_only(tmp_path):
    steps = [2, 4, 5, 7, 9, 10]
    assert said(tmp_path, accumulate_grad_batches=2)["row_is_to_come"] == steps
    for hook in ("on_train_batch_start", "on_before_zero_grad", "on_validation_end"):
        assert said(tmp_path, hook, num_sanity_val_steps=0)["row_is_to_come"] == []
