"""Dispersive loss: pushes the features of different images apart."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lit_diffusion.auxiliary_losses.features import BlockFeatures
from lit_diffusion.protocols import NoisedBatch, check_positive


class Dispersive:
    """Dispersive loss `weight * log(mean_ij exp(-||z_i - z_j||**2 / (D * temperature)))`.

    The vector z_i, of size D, contains all features of image i in a block. The mean is over all
    pairs (i, j) of images of the batch on one device, including i = j. The loss is at most 0. It is
    lowest if the features of different images are far apart.

    The division by D makes the temperature independent of the size of the block. With the default
    temperature of 1, the loss equals the loss in the authors' PyTorch code, which divides by D and
    has no temperature. Their code uses the last block and a weight of 0.25. The paper uses a block
    at a quarter of the depth, a weight of 0.5 and a temperature of 0.5, and does not divide by D.
    The loss is computed in float32, also under autocast.

    Args:
        block: name of the block in the network, such as "blocks.3".
        weight: factor on the loss.
        temperature: scale of `||z_i - z_j||**2 / D`. Pairs for which this distance is much larger
            than the temperature contribute almost nothing to the loss.

    Raises:
        ValueError: unless weight and temperature are above 0.

    Source: Wang & He 2025 (Diffuse and Disperse, arXiv 2506.09027), Eq. 6, InfoNCE with the squared
        L2 distance.

    Example:
        >>> from lit_diffusion.networks.dit import DiT
        >>> network = DiT(8, 1, 1, depth=2, width=32, num_heads=2)
        >>> loss = Dispersive(block="blocks.0")
        >>> loss.attach(network)
        >>> _ = network(torch.randn(4, 1, 8, 8), torch.arange(4.0))
        >>> loss.compute(None, None) < 0
        tensor(True)
    """

    def __init__(self, block: str, weight: float = 0.5, temperature: float = 1.0) -> None:
        check_positive(weight=weight, temperature=temperature)
        self.weight, self.temperature = weight, temperature
        self.features = BlockFeatures(block)

    def attach(self, network: nn.Module, /) -> None:
        """Register a forward hook on the block. Raise ValueError if there is no such block."""
        self.features.attach(network)

    def compute(self, module: Any, batch: NoisedBatch, /) -> Tensor:
        """Compute the loss of the features from the last forward pass, as a scalar."""
        z = self.features.take().float().flatten(1)  # (B, D)
        with torch.autocast(z.device.type, enabled=False):
            # |a - b|**2 = |a|**2 + |b|**2 - 2 a.b, because the gradient of cdist is infinite at 0.
            # Without the mean, which all images share, little is canceled in the subtraction.
            z = z - z.mean(0)
            products = z @ z.T  # (B, B)
            squares = products.diagonal()  # so that i = j has the distance 0 exactly
            distances = (squares[:, None] + squares - 2 * products).clamp(min=0)
            exponents = -distances / (z.shape[1] * self.temperature)
            return self.weight * (exponents.flatten().logsumexp(0) - 2 * math.log(len(z)))
