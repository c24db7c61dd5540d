import re
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from support.plain_module import make_trainer
from support.tiny_diffusion import tiny_diffusion
from torch.utils.data import TensorDataset

from lit_diffusion.data.digits import Digits
from lit_diffusion.data.loaders import ResumableLoader, batches_of_epoch
from lit_diffusion.data.samplers import ShuffledSampler

DATA = TensorDataset(torch.arange(10))


def loader(done, **options):
    return ResumableLoader(
        DATA, lambda: done[0], sampler=ShuffledSampler(DATA, 3), batch_size=2, **options
    )


def values(batches):
    return [x.tolist() for (x,) in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_after_the_batches_that_were_done(workers):
    done = [0]
    numbers = loader(done, num_workers=workers, persistent_workers=workers > 0)
    whole = values(numbers)
    assert sorted(value for batch in whole for value in batch) == list(range(10))
    for count in (1, 4, 5):
        done[0] = count
        assert values(numbers) == whole[count:]
    done[0] = 0
    assert values(numbers) == whole
    assert len(numbers) == 5


def test_nothing_is_asked_before_the_first_batch_is_wanted():
    asked = []
    numbers = ResumableLoader(
        DATA, lambda: asked.append(1) or 0, sampler=ShuffledSampler(DATA, 3), batch_size=2
    )
    batches = iter(numbers)
    assert not asked
    next(batches)
    assert asked == [1]


def test_an_order_that_is_not_ours_goes_on_too():
    assert values(ResumableLoader(DATA, lambda: 0, batch_size=5)) == [[*range(5)], [*range(5, 10)]]
    assert values(ResumableLoader(DATA, lambda: 1, batch_size=5)) == [[*range(5, 10)]]


def test_a_trainer_tells_how_far_its_epoch_is(tmp_path, monkeypatch):
    seen = []

    def told(trainer):
        seen.append(batches_of_epoch(trainer))
        return seen[-1]

    monkeypatch.setattr("lit_diffusion.data.base.batches_of_epoch", told)
    module = tiny_diffusion(num_classes=None, label_dropout=0.0)
    data = Digits(batch_size=500)
    make_trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(module, data)
    assert seen == [0, 0]


class Indices(Callback):
    """The indices of the images of each batch; saves after batch `save` of the first epoch."""

    def __init__(self, path=None, save=None, validated=False):
        self.path, self.save, self.validated = path, save, validated
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch[2].tolist())
        if not self.validated:
            self._save(trainer)

    def on_validation_end(self, trainer, pl_module):
        if self.validated:
            self._save(trainer)

    def _save(self, trainer):
        if len(self.batches) == self.save:
            trainer.save_checkpoint(self.path)


def train(folder, batch_size, indices, ckpt_path=None, **options):
    module = tiny_diffusion(num_classes=None, label_dropout=0.0)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0} | options
    trainer = make_trainer(folder, indices, **options)
    trainer.fit(module, Digits(batch_size=batch_size, seed=1), ckpt_path=ckpt_path)
    return trainer


def flat(batches):
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize(
    ("sizes", "save", "again", "told"),
    [
        ((100, 50), 6, 0, None),  # of 14 batches
        ((100, 200), 6, 0, None),
        ((100, 130), 6, 80, "600 images into an epoch, which are no .* of 130 images"),
        ((100, 700), 6, 600, "goes on after 0"),
        ((100, 50), 14, None, None),
        ((100, 300), 14, None, None),
    ],
)
@pytest.mark.parametrize("validated", [False, True])
def test_an_epoch_goes_on_after_the_images_it_had_with_batches_of_another_size(
    tmp_path, sizes, save, again, told, validated
):
    """Where they are no whole number of the new batches, it says so; a full epoch is over."""
    file, options = tmp_path / "some.ckpt", {"val_check_interval": 2} if validated else {}
    first, then = Indices(file, save, validated), Indices()
    train(tmp_path, sizes[0], first, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(tmp_path, sizes[1], then, file, **options)
    said = [str(w.message) for w in caught if "images into an epoch" in str(w.message)]
    assert len(said) == (told is not None)
    assert all(re.search(told, text) for text in said)
    assert trainer.current_epoch == 2
    order = ShuffledSampler(Digits().dataset("train"), 1)
    epochs = [order.set_epoch(n) or [key % len(order) for key in order] for n in (0, 1)]
    length = len(order) // sizes[1] * sizes[1]
    had = length if again is None else save * sizes[0] - again
    assert flat(then.batches) == epochs[0][had:length] + epochs[1][:length]


def test_whole_steps_of_accumulated_batches_are_what_an_epoch_goes_on_with(tmp_path):
    file = tmp_path / "some.ckpt"
    first, then = Indices(file, 3), Indices()
    train(tmp_path, 100, first)
    with pytest.warns(UserWarning, match=r"of 200 images: it goes on after 200"):
        train(tmp_path, 50, then, file, accumulate_grad_batches=4)
    assert flat(then.batches)[:1000] == flat(first.batches)[200:1200]
