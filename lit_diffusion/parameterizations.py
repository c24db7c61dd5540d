"""What the network outputs, and how to read x0 back from it.

Every class turns (x0, noise) into a training target and an output back into x0, for x_t = alpha x0
+ sigma noise.
Shapes: images (B, C, H, W); alpha and sigma broadcastable to them and of their dtype
(`gaussian.expand_as`). `gain` is |d x0 / d output|: it turns a weight on the error of x0 into one
on the error of the output (losses.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Epsilon:
    """The noise. Ill conditioned where alpha nears 0.

    Source: Ho et al. 2020 (DDPM), Eq. 11-14.
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """The noise."""
        return noise

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """(x_t - sigma output) / alpha."""
        return (x_t - sigma * output) / alpha

    def gain(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """sigma / alpha."""
        return sigma / alpha


@dataclass(frozen=True)
class Sample:
    """The clean image.

    Source: Ho et al. 2020 (DDPM), section 3.2.
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """x0."""
        return x0

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """The output."""
        return output

    def gain(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """1."""
        return torch.ones_like(alpha)


@dataclass(frozen=True)
class Velocity:
    """v = alpha noise - sigma x0, well conditioned at both ends of time.

    The shipped configs use it.

    Source: Salimans & Ho 2022 (progressive distillation), section 4 and appendix D.
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Alpha noise - sigma x0."""
        return alpha * noise - sigma * x0

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """(alpha x_t - sigma output) / (alpha^2 + sigma^2)."""
        return (alpha * x_t - sigma * output) / (alpha**2 + sigma**2)

    def gain(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Sigma / (alpha^2 + sigma^2)."""
        return sigma / (alpha**2 + sigma**2)
