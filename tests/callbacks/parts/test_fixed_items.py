import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from support.pictures_module import Stripes, pictures
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from lit_diffusion.callbacks.parts.fixed_items import indexed_loader, items_of, read, spread
from lit_diffusion.data.digits import Digits

WRAPPERS = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)


def test_spread_covers_the_whole_range_without_repeats():
    for size in (1, 7, 100):
        for num in (1, 6, 100, 1000):
            indices = spread(size, num)
            assert len(set(indices)) == len(indices) == min(size, num)
            assert all(0 <= i < size for i in indices)
            gaps = [b - a for a, b in zip(indices, [*indices[1:], size], strict=True)]
            assert max(gaps) - min(gaps) <= 1


def test_items_are_read_at_their_indices_and_collated_as_the_loader_does():
    images, labels = next(read(pictures(), [3, 17]))
    assert torch.equal(images, torch.stack([Stripes()[3][0], Stripes()[17][0]]))
    assert labels.tolist() == [0, 2]


def test_data_sets_that_fetch_whole_batches_are_read_too():
    data = Digits(batch_size=7)
    images, _, index = next(read(data.train_dataloader(), [5, 900]))
    assert index.tolist() == [5, 900]
    assert torch.equal(images, data.images("train")[[5, 900]])


def test_a_running_epoch_of_the_loader_goes_on_undisturbed():
    loader = pictures(num_workers=1, persistent_workers=True)
    epoch = iter(loader)
    first = next(epoch)
    next(read(loader, [0]))
    rest = list(epoch)
    assert torch.equal(torch.cat([b[0] for b in [first, *rest]]), torch.cat([b[0] for b in loader]))


@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
def test_a_sampler_of_a_subset_makes_the_items_a_subset(wrapper):
    sampler = SubsetRandomSampler([11, 3, 7])
    if wrapper:  # as Lightning's, on two ranks
        sampler = wrapper(sampler, num_replicas=2, rank=1)
    loader = DataLoader(Stripes(), 2, sampler=sampler)
    assert len(items_of(loader)) == 3
    images, _ = next(read(loader, [0, 2]))
    assert torch.equal(images, torch.stack([Stripes()[11][0], Stripes()[7][0]]))


def test_ready_made_batches_have_no_items():
    assert indexed_loader(DataLoader(Stripes(), batch_size=None)) is None


def test_streams_have_no_indices():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    stream, indexed = DataLoader(Stream()), pictures()
    assert indexed_loader({"a": stream, "b": [indexed]}) is indexed
    assert indexed_loader([stream]) is None
    assert indexed_loader(None) is None
