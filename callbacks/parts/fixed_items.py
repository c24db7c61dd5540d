"""The same items of a data set at every evaluation, without touching the loader that trains."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lit_diffusion.trainer_state import own_sampler


def indexed_loader(loaders: Any) -> "DataLoader[Any] | None":
    """The first DataLoader in what a Trainer holds whose data set can be read at an index.

    None for streams, and for data sets of ready-made batches, which have `batch_size=None`.
    """
    for loader in CombinedLoader(loaders).flattened:
        has_items = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if has_items and not isinstance(loader.dataset, IterableDataset):
            return loader  # type: ignore[no-any-return]
    return None


def items_of(loader: "DataLoader[Any]") -> "Dataset[Any]":
    """The data set, or the part of it that a `SubsetRandomSampler` takes."""
    indices = getattr(own_sampler(loader), "indices", None)
    return loader.dataset if indices is None else Subset(loader.dataset, list(indices))


def spread(size: int, num: int) -> list[int]:
    """At most `num` indices, evenly over `size`: data sets are often sorted by class."""
    num = min(num, size)
    return [i * size // num for i in range(num)]


def read(loader: "DataLoader[Any]", indices: list[int]) -> Iterator[Any]:
    """Batches of these items, collated as the loader does, by a fresh loader in this process.

    Iterating the loader itself would restart its persistent workers in the middle of an epoch.
    """
    return iter(
        DataLoader(items_of(loader), batch_size=256, sampler=indices, collate_fn=loader.collate_fn)
    )
