"""Losses on the line between two sets of weights.

Source: "Why diffusion models are stable and how to make them faster" (2023), Eq. 2; Goodfellow et
al. 2015, "Qualitatively characterizing neural network optimization problems".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lit_diffusion.lab.analysis.consistency import Floats
from lit_diffusion.lab.analysis.saved import Saved
from lit_diffusion.lab.analysis.weights import State, between, put_, restored

Losses = Mapping[str, Callable[[], Tensor]]
"""By name, a loss of the weights in place on a fixed batch with fixed noise."""


@dataclass(frozen=True)
class Interpolation(Saved):
    """Losses at alpha a + (1 - alpha) b.

    Attributes:
        names: of the losses.
        alphas: (K,), 1 at a.
        values: (len(names), K).
    """

    names: list[str]
    alphas: Floats
    values: Floats

    @property
    def barriers(self) -> dict[str, float]:
        """By how much each loss rises above the straight line between its ends, at most.

        Needs alphas that rise from 0 to 1.
        """
        line = self.alphas * self.values[:, -1:] + (1 - self.alphas) * self.values[:, :1]
        return dict(zip(self.names, (self.values - line).max(axis=1).tolist(), strict=True))


@torch.no_grad()
def interpolate(
    module: nn.Module,
    a: State,
    b: State,
    losses: Losses,
    alphas: Sequence[float] | Floats,
) -> Interpolation:
    """Losses of a module at alpha a + (1 - alpha) b; its weights are put back.

    Args:
        module: that the losses are of.
        a: weights, as `weights.state_of` gives them.
        b: others of the same architecture.
        losses: what to compute at each point.
        alphas: points on the line, 1 at a.

    Raises:
        ValueError: for weights of different architectures.
    """
    values = np.full((len(losses), len(alphas)), np.nan)
    with restored(module):
        for k, alpha in enumerate(alphas):
            put_(module, between(a, b, alpha))
            values[:, k] = [loss().item() for loss in losses.values()]
    return Interpolation(list(losses), np.array(alphas), values)
