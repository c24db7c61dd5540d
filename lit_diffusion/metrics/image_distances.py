"""Distances between images: PSNR and nearest neighbors."""

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

MAX_PSNR = 100.0
"""Upper limit of PSNR in dB, because the PSNR of equal images would be infinite."""

NUM_CANDIDATES = 8
"""Number of images of a chunk whose exact distances `nearest_neighbors` compares."""


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio between image i of `a` and image i of `b`.

    Args:
        a: uint8 (N, C, H, W).
        b: uint8 (N, C, H, W).

    Returns:
        PSNR (N,) in dB, at most `MAX_PSNR`.

    Example:
        >>> black = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
        >>> psnr(black, black).item(), round(psnr(black, black + 255).item(), 3)
        (100.0, 0.0)
    """
    dims = tuple(range(1, a.ndim))
    values = peak_signal_noise_ratio(
        a.double(), b.double(), data_range=255.0, reduction="none", dim=dims
    )
    return values.nan_to_num(posinf=MAX_PSNR).clamp(max=MAX_PSNR)


def pairwise_psnr(a: Tensor, b: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio between every image of `a` and every image of `b`.

    Args:
        a: uint8 (N, C, H, W).
        b: uint8 (M, C, H, W).

    Returns:
        PSNR (N, M) in dB, at most `MAX_PSNR`.

    Example:
        >>> images = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
        >>> pairwise_psnr(images, images).diag().tolist()
        [100.0, 100.0, 100.0]
    """
    distance = torch.cdist(a.flatten(1).double(), b.flatten(1).double())
    return (20 * (255 * a[0].numel() ** 0.5 / distance).log10()).clamp(max=MAX_PSNR)


def nearest_neighbors(images: Tensor, bank: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Find the nearest neighbor of each image in a bank of images.

    Args:
        images: images or features (N, ...).
        bank: images or features (M, ...) among which to search.
        chunk: number of images of the bank to compare at a time, which limits the memory.

    Returns:
        The L2 distance (N,) to the nearest image of the bank, and the index (N,) of this image.

    Example:
        >>> bank = torch.arange(0, 250, 50, dtype=torch.uint8).view(5, 1, 1, 1)
        >>> nearest_neighbors(torch.tensor([[[[60]]], [[[190]]]], dtype=torch.uint8), bank)
        (tensor([10., 10.]), tensor([1, 4]))
    """
    queries = images.flatten(1).float()
    distance = queries.new_full((len(queries),), torch.inf)
    index = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    for start, bank_chunk in zip(range(0, len(bank), chunk), torch.split(bank, chunk), strict=True):
        rows = bank_chunk.flatten(1).float()
        # `cdist` subtracts large products, so it is inexact for images that are nearly equal.
        nearest = torch.cdist(queries, rows).topk(min(NUM_CANDIDATES, len(rows)), largest=False)
        for candidate in nearest.indices.sort(dim=1).values.T:
            exact = (queries - rows[candidate]).norm(dim=1)
            index = torch.where(exact < distance, start + candidate, index)
            distance = distance.minimum(exact)
    return distance, index
