"""Whether samples are copies of training images."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """Training images (N, ...), and how near to them held-out images usually are.

    `usual` is the median over held-out images of the distance to their nearest training image.
    """

    bank: Tensor
    usual: Tensor

    @classmethod
    def beside(cls, bank: Tensor, held_out: Tensor) -> "Copies":
        """Of training and of held-out images, or their features."""
        return cls(bank, nearest(held_out, bank)[0].median())

    def share(self, samples: Tensor) -> float:
        """Share of samples no farther from a training image than the median held-out image is.

        New images give about 0.5, copies 1.
        """
        return share_below(nearest(samples, self.bank)[0], self.usual)


def share_below(distances: Tensor, usual: Tensor) -> float:
    """Share of distances that are at most usual."""
    return (distances <= usual).double().mean().item()


def nearest(images: Tensor, bank: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Distance and index of the image of `bank` that is nearest to each of `images`, in L2.

    Both are (., ...) of one shape; the bank is compared in chunks.

    Example:
        >>> bank = torch.arange(0, 250, 50, dtype=torch.uint8).view(5, 1, 1, 1)
        >>> nearest(torch.tensor([[[[60]]], [[[190]]]], dtype=torch.uint8), bank)
        (tensor([10., 10.]), tensor([1, 4]))
    """
    queries = images.flatten(1).float()
    best = queries.new_full((len(queries),), torch.inf)
    index = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    for start, part in zip(range(0, len(bank), chunk), torch.split(bank, chunk), strict=True):
        found = torch.cdist(queries, part.flatten(1).float()).min(dim=1)
        index = torch.where(found.values < best, start + found.indices, index)
        best = best.minimum(found.values)
    return best, index
