"""The same items of a data set at every evaluation, without touching the loader that trains."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset


def indexed_loader(loaders: Any) -> "DataLoader[Any] | None":
    """The first DataLoader in what a Trainer holds whose data set can be read at an index."""
    for loader in CombinedLoader(loaders).flattened:
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return loader
    return None


def spread(size: int, num: int) -> list[int]:
    """At most `num` indices, evenly over `size`: data sets are often sorted by class."""
    num = min(num, size)
    return [i * size // num for i in range(num)]


def read(loader: "DataLoader[Any]", indices: list[int]) -> Iterator[Any]:
    """Batches of these items, collated as the loader does, by a fresh loader in this process.

    Iterating the loader itself would restart its persistent workers in the middle of an epoch.
    """
    return iter(
        DataLoader(loader.dataset, batch_size=256, sampler=indices, collate_fn=loader.collate_fn)
    )
