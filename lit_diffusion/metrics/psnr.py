"""Peak signal-to-noise ratio of images in bytes."""

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

CAP = 100.0
"""dB of images that are the same, whose PSNR is infinite."""


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """(N,) PSNR in dB, image by image, of uint8 (N, C, H, W) with a range of 255; at most `CAP`."""
    dims = tuple(range(1, a.ndim))
    pair = a.double(), b.double()
    found = peak_signal_noise_ratio(*pair, data_range=255.0, reduction="none", dim=dims)
    capped: Tensor = found.nan_to_num(posinf=CAP).clamp(max=CAP)
    return capped


def psnr_of_all(a: Tensor, b: Tensor) -> Tensor:
    """(N, N) as `psnr`, of each image of a beside each of b."""
    apart = torch.cdist(a.flatten(1).double(), b.flatten(1).double())
    found: Tensor = 20 * (255 * a[0].numel() ** 0.5 / apart).log10()
    return found.clamp(max=CAP)
