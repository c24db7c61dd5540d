import random
from types import SimpleNamespace

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from support.pictures_module import Stripes, pictures
from support.pixels import random_images
from support.plain_module import PlainModule, make_trainer
from support.rising import Rising, loader, trainer
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from lit_diffusion.callbacks import SampleGrid
from lit_diffusion.callbacks.evaluation import (
    PeriodicEvaluation,
    generate_images,
    indexed_loader,
    inference_mode,
    read_fixed_images,
    split_images,
)
from lit_diffusion.data.digits import Digits
from lit_diffusion.protocols import NonFiniteSamples

# When


class Steps(PeriodicEvaluation):
    """The steps at which it measured."""

    def __init__(self, n):
        super().__init__(n)
        self.measured = []

    def measure(self, trainer, pl_module):
        self.measured.append(trainer.global_step)
        return {}

    def metric_names(self):
        return []

    def run(self, steps, first=0):
        self.on_train_start(SimpleNamespace(global_step=first), None)
        for step in steps:
            at = SimpleNamespace(global_step=step, loggers=[], callbacks=[])
            self.on_train_batch_end(at, None, None, None, 0)
        return self.measured


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_multiple_is_measured_once_however_many_steps_a_batch_takes(stride):
    measured = Steps(10).run(step for step in range(0, 100, stride) for _ in range(3))
    assert [step // 10 for step in measured] == list(range(1, 10))
    assert all(step % 10 < stride for step in measured)
    assert Steps(None).run(range(100)) == []


@pytest.mark.parametrize("resumed_at", [0, 5, 10, 11, 29])
def test_a_resumed_run_measures_where_the_undisturbed_one_does(resumed_at):
    expected = [step for step in Steps(10).run(range(1, 40)) if step > resumed_at]
    assert Steps(10).run(range(resumed_at + 1, 40), resumed_at) == expected


# Weights and mode


def test_modes_are_as_before_and_outputs_may_be_trained_on(tmp_path):
    module, run = PlainModule(), make_trainer(tmp_path)
    module.train()
    module.inner[1].eval()
    modes = [m.training for m in module.modules()]
    with inference_mode(run, module):
        assert not any(m.training for m in module.modules())
        output = module.inner(torch.ones(2, 4))
    assert [m.training for m in module.modules()] == modes
    assert not output.requires_grad
    (output.sum() * module.inner[0].weight.sum()).backward()  # which inference tensors refuse


@pytest.mark.parametrize("kind", [lightning.pytorch, pytorch_lightning])
def test_averages_that_lightning_puts_in_place_by_itself_are_refused_by_name(kind):
    ours, theirs = SampleGrid(2), kind.callbacks.EMAWeightAveraging()
    run = kind.Trainer(callbacks=[ours, theirs], accelerator="cpu", logger=False)
    message = r"SampleGrid cannot know .* EMAWeightAveraging.*callbacks.EMA"
    with pytest.raises(ValueError, match=message):
        ours.setup(run, PlainModule(), "fit")


# Samples


def generated(outcome, seeds):
    """What becomes of what a module returns or raises."""

    def generate(seeds, labels=None):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    module = Rising()
    module.generate = generate
    return generate_images(module, seeds)


def test_samples_are_uint8_images_or_the_seeds_of_those_that_are_not_finite():
    images = random_images(3, 0)
    assert generated(images, range(3)) == (images, [])
    error = NonFiniteSamples([4, 5], step=10, where="t = 3")
    assert generated(error, [3, 4, 5]) == (None, [4, 5])
    for value in (torch.nan, torch.inf):
        images = torch.zeros(3, 1, 2, 2)
        images[1, 0, 1, 1] = value
        assert generated(images, [3, 4, 5]) == (None, [4])


@pytest.mark.parametrize(
    "outcome",
    [torch.rand(3, 1, 2, 2), torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, 4).byte()],
)
def test_anything_else_is_refused_with_what_it_is(outcome):
    with pytest.raises(TypeError, match=r"must return 3 images, uint8 \(N, C, H, W\)"):
        generated(outcome, range(3))


# Images of the data


def all_images(images):
    return torch.cat([batch for batch, _ in images.batches(100)])


def test_splits_of_a_data_module_come_unaugmented_in_order_and_with_its_fingerprint():
    run = SimpleNamespace(datamodule=Digits(batch_size=16))
    for name, split in (("train", "train"), ("val", "val"), ("test", "val")):
        images = split_images(run, name)
        assert images.name == split
        assert torch.equal(all_images(images), Digits().images(split))
        assert images.fingerprint == Digits().fingerprint(split)


def test_splits_of_foreign_loaders_are_all_their_images_in_order(tmp_path):
    run = trainer(tmp_path, [], max_steps=1)
    run.fit(Rising(), loader(8, seed=0, batch_size=4), [loader(6, seed=1), loader(5, seed=2)])
    for name, count, seed in (("train", 8, 0), ("val", 6, 1)):
        assert torch.equal(all_images(split_images(run, name)), random_images(count, seed))
    assert split_images(run, "test") is None


def test_images_are_spread_over_the_data_set_and_all_of_a_small_one():
    images, labels, indices = read_fixed_images(pictures(), 5)
    assert indices == [0, 4, 8, 12, 16]
    assert torch.equal(images, torch.stack([Stripes()[i][0] for i in indices]))
    assert labels.tolist() == [Stripes()[i][1] for i in indices]
    assert read_fixed_images(pictures(6), 64).indices == list(range(6))
    unlabelled = read_fixed_images(DataLoader(list(random_images(6, 0)), batch_size=2), 4)
    assert (unlabelled.labels, unlabelled.images.shape) == (None, (4, 1, 2, 2))


def test_random_augmentation_is_the_same_in_every_call_and_consumes_no_random_numbers():
    def draw(end):
        draws = torch.randint(end, ()), np.random.randint(end), random.randrange(end)  # noqa: NPY002
        return sum(map(int, draws))

    class Augmented(Stripes):
        def __getitem__(self, index):
            return torch.full((1, 6, 4), draw(100)), 0

    with isolate_rng():
        expected = draw(10**9)
    first = read_fixed_images(DataLoader(Augmented(), 5), 4).images
    assert draw(10**9) == expected
    assert torch.equal(read_fixed_images(DataLoader(Augmented(), 5), 4).images, first)
    assert len(first.unique()) > 1


def test_a_running_epoch_of_the_loader_goes_on_undisturbed():
    loader = pictures(num_workers=1, persistent_workers=True)
    epoch = iter(loader)
    first = next(epoch)
    read_fixed_images(loader, 2)
    rest = list(epoch)
    assert torch.equal(torch.cat([b[0] for b in [first, *rest]]), torch.cat([b[0] for b in loader]))


def test_streams_and_ready_made_batches_have_no_indices():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    stream, indexed = DataLoader(Stream()), pictures()
    assert indexed_loader({"a": stream, "b": [indexed]}) == (indexed, indexed.dataset)
    part = DataLoader(["a", "b", "c"], sampler=SubsetRandomSampler([2, 0]))
    assert list(indexed_loader(part)[1]) == ["c", "a"]
    for loaders in ([stream], None, DataLoader(Stripes(), batch_size=None)):
        assert indexed_loader(loaders) is None
    with pytest.raises(ValueError, match="with indices"):
        read_fixed_images(stream, 3)
