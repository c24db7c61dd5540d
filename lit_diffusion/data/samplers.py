"""Which images each process sees, in which order.

A DistributedSampler knows its rank, so the Trainer leaves it alone: any other sampler it would pad
with repeated images or, if that already shards, shard a second time.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from lit_diffusion.seeding import fold


class ShuffledSampler(DistributedSampler[Any]):
    """Every epoch a new order, a function of (seed, epoch) alone; yields keys `epoch * N + index`.

    Ranks take turns in one common order, so step k of an epoch sees the same images on one process
    with batch B * R as on R processes with batch B. Each rank gets floor(N / R) images; the up to
    R - 1 left over differ from epoch to epoch. N is the length of the dataset, R `num_replicas`.
    """

    start = 0
    """Number of this rank's keys that are left out at the beginning of an epoch."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(fold("order", self.seed, self.epoch))
        order = torch.randperm(size, generator=generator)
        mine = order[self.rank : self.total_size : self.num_replicas]
        return iter((self.epoch * size + mine[self.start :]).tolist())


def even_batch_size(num_images: int, num_replicas: int, batch_size: int) -> int:
    """The least size, from `batch_size` up, that gives every process the same number of batches.

    Shares of an unrepeated split differ by up to one image, which can be one batch more; with a
    sharded model (FSDP), whose every forward pass communicates, that process would wait for ever.

    Example:
        >>> even_batch_size(360, 2, 64)
        64
        >>> even_batch_size(129, 2, 64)  # 65 + 64 images would be 2 batches and 1
        65
    """
    if num_images < num_replicas:
        raise ValueError(
            f"Every process needs an image, got {num_images} images for {num_replicas} processes:"
            " use fewer devices or more images."
        )
    least, most = num_images // num_replicas, -(-num_images // num_replicas)
    return next(size for size in count(batch_size) if -(-least // size) == -(-most // size))
