import re
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from support.plain_module import make_trainer
from support.tiny_diffusion import tiny_diffusion
from torch.utils.data import TensorDataset

from lit_diffusion.data.digits import Digits
from lit_diffusion.data.loaders import (
    ResumableLoader,
    ShuffledSampler,
    even_batch_size,
)


def of(num_images):
    return TensorDataset(torch.arange(num_images))


def shuffled(num_images, num_replicas=1, rank=0, seed=0, epoch=0):
    sampler = ShuffledSampler(of(num_images), seed, num_replicas, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_every_process_gets_the_same_number_of_batches():
    for num_images in range(3, 80):
        for num_replicas in (1, 2, 3):
            for least in (1, 2, 5, 16):
                size = even_batch_size(num_images, num_replicas, least)
                shares = [len(range(r, num_images, num_replicas)) for r in range(num_replicas)]
                assert len({-(-share // size) for share in shares}) == 1
                assert least <= size <= max(least, *shares)
                assert size == least or num_replicas > 1
    with pytest.raises(ValueError, match="got 2 images for 3 processes"):
        even_batch_size(2, 3, 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_global_batch_is_the_same_on_any_number_of_processes(num_replicas):
    alone = shuffled(61, epoch=1)
    assert sorted(alone) == list(range(61, 122))
    shares = [shuffled(61, num_replicas, rank, epoch=1) for rank in range(num_replicas)]
    assert {len(share) for share in shares} == {61 // num_replicas}
    for step in range(5):
        batch = [key for share in shares for key in share[4 * step : 4 * (step + 1)]]
        size = 4 * num_replicas
        assert sorted(batch) == sorted(alone[size * step : size * (step + 1)])


def test_training_order_is_a_function_of_seed_and_epoch():
    assert shuffled(50, seed=1, epoch=2) == shuffled(50, seed=1, epoch=2)
    settings = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = {tuple(k % 50 for k in shuffled(50, seed=s, epoch=e)) for s, e in settings}
    assert len(orders) == 4


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


class Indices(Callback):
    """The indices of the images of each batch; saves after batch `save`, or its validation."""

    def __init__(self, path=None, save=None, validated=False):
        self.path, self.save, self.validated = path, save, validated
        self.index = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.index.append(batch[2].tolist())
        if not self.validated and len(self.index) == self.save:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer, pl_module):
        if self.validated and len(self.index) == self.save:
            trainer.save_checkpoint(self.path)

    def flat(self):
        return [place for batch in self.index for place in batch]


def train(folder, batch_size, indices, ckpt_path=None, **options):
    module = tiny_diffusion(num_classes=None, label_dropout=0.0)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0} | options
    trainer = make_trainer(folder, indices, **options)
    trainer.fit(module, Digits(batch_size=batch_size, seed=1), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.quick("False-sizes0-2-0-None", "True-sizes2-2-600-continues after 0")
@pytest.mark.parametrize(
    ("sizes", "save", "again", "message"),
    [
        ((300, 150), 2, 0, None),  # of 4 batches
        ((100, 130), 6, 80, "600 images into an epoch, which is not .* of 130 images"),
        ((300, 700), 2, 600, "continues after 0"),
        ((100, 300), 14, None, None),
    ],
)
@pytest.mark.parametrize("validated", [False, True])
def test_an_epoch_goes_on_after_the_images_it_had_with_batches_of_another_size(
    tmp_path, sizes, save, again, message, validated
):
    """Where they are no whole number of the new batches, it says so; a full epoch is over."""
    file, options = tmp_path / "some.ckpt", {"val_check_interval": 2} if validated else {}
    first, then = Indices(file, save, validated), Indices()
    train(tmp_path, sizes[0], first, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(tmp_path, sizes[1], then, file, **options)
    messages = [str(w.message) for w in caught if "images into an epoch" in str(w.message)]
    assert len(messages) == (message is not None)
    assert all(re.search(message, text) for text in messages)
    assert trainer.current_epoch == 2
    order = ShuffledSampler(Digits().dataset("train"), 1)
    epochs = [order.set_epoch(n) or [key % len(order) for key in order] for n in (0, 1)]
    length = len(order) // sizes[1] * sizes[1]
    had = length if again is None else save * sizes[0] - again
    assert then.flat() == epochs[0][had:length] + epochs[1][:length]


def test_after_a_fit_a_loader_yields_a_whole_epoch(tmp_path):
    trainer = train(tmp_path, 300, Indices(), max_epochs=-1, max_steps=3)
    batches = list(trainer.datamodule.train_dataloader())
    assert len(batches) == 4
    images = Digits(batch_size=300, seed=1)
    for batch, expected in zip(batches, images.train_dataloader(), strict=True):
        assert torch.equal(batch[2], expected[2])


def test_whole_steps_of_accumulated_batches_are_what_an_epoch_goes_on_with(tmp_path):
    file = tmp_path / "some.ckpt"
    first, then = Indices(file, 3), Indices()
    train(tmp_path, 100, first, max_epochs=1)
    with pytest.warns(UserWarning, match=r"of 200 images: the epoch continues after 200"):
        train(tmp_path, 50, then, file, accumulate_grad_batches=4, max_epochs=1)
    assert then.flat()[:1000] == first.flat()[200:1200]
