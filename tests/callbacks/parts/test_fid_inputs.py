import pytest
import torch
from support.pixels import random_images
from support.rising import Rising, loader, trainer

from lit_diffusion.callbacks.parts.fid_inputs import (
    generated,
    refuse_unable,
    shares,
    split_images,
)
from lit_diffusion.data.digits import Digits
from lit_diffusion.protocols import NonFiniteSamples


@pytest.mark.parametrize("total", [1, 2, 10, 360])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_seed_is_drawn_once_on_any_number_of_processes(total, world_size):
    ranks = [shares(total, rank, world_size, 4) for rank in range(world_size)]
    assert sorted(seed for batches in ranks for batch in batches for seed in batch) == list(
        range(total)
    )
    assert len({len(batches) for batches in ranks}) == 1
    assert max(len(batch) for batches in ranks for batch in batches) <= 4


class Fixed(Rising):
    """Returns, or raises, what it is given."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    def generate(self, seeds, labels=None):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_images_that_are_uint8_pass_as_they_are():
    images = random_images(3, 0)
    assert generated(Fixed(images), range(3)) == (images, [])


def test_seeds_that_a_module_names_are_not_finite():
    error = NonFiniteSamples([4, 5], step=10, where="t = 3")
    assert generated(Fixed(error), [3, 4, 5]) == (None, [4, 5])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_float_images_that_are_not_finite_are_named_by_seed(value):
    images = torch.zeros(3, 1, 2, 2)
    images[1, 0, 1, 1] = value
    assert generated(Fixed(images), [3, 4, 5]) == (None, [4])


@pytest.mark.parametrize(
    "outcome",
    [torch.rand(3, 1, 2, 2), torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, 4).byte()],
)
def test_anything_else_is_refused_with_what_it_is(outcome):
    with pytest.raises(TypeError, match=r"must return 3 images, uint8 \(N, C, H, W\)"):
        generated(Fixed(outcome), range(3))


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        (lambda num: None, "too many positional arguments"),
        (lambda seeds, labels, steps: None, "missing a required argument: 'steps'"),
        (None, "None is not a callable"),
    ],
)
def test_a_module_that_cannot_be_asked_is_refused_before_it_is(generate, reason):
    module = Rising()
    module.generate = generate
    with pytest.raises(TypeError, match=f"Grid needs .*Rising has none such: {reason}"):
        refuse_unable(module, "Grid")
    module.generate = lambda seeds, labels=None: None
    refuse_unable(module, "Grid")


def test_labels_are_the_seeds_modulo_the_classes():
    module = Rising().eval()
    module.num_classes = 3
    with torch.no_grad():
        generated(module, [0, 1, 2, 3, 10])
    assert module.labels == [0, 1, 2, 0, 1]


def test_splits_of_a_data_module_come_unaugmented_in_order_and_with_its_fingerprint(tmp_path):
    class Owner:
        datamodule = Digits(batch_size=16)

    for name, split in (("train", "train"), ("val", "val"), ("test", "val")):
        images = split_images(Owner, name)
        assert images.name == split
        found = torch.cat([batch for batch, _ in images.batches(100)])
        assert torch.equal(found, Digits().images(split))
        assert images.fingerprint() == Digits().fingerprint(split)


def test_splits_of_foreign_loaders_are_all_their_images_in_order(tmp_path):
    run = trainer(tmp_path, [], max_steps=1)
    run.fit(Rising(), loader(8, seed=0, batch_size=4), [loader(6, seed=1), loader(5, seed=2)])
    for name, count, seed in (("train", 8, 0), ("val", 6, 1)):
        found = torch.cat([batch for batch, _ in split_images(run, name).batches(3)])
        assert torch.equal(found, random_images(count, seed))
    assert split_images(run, "test") is None
