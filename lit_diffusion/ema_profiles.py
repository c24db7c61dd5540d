"""Averages of weights by power functions of time, and any width of them from a few snapshots.

An average at step t has the profile p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1) over the weights
of steps tau in [0, t]; gamma belongs to the relative width, its standard deviation over t.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

LARGEST_WIDTH = 1 / sqrt(12)
"""Of the uniform profile, gamma = 0."""


def exponent(width: float) -> float:
    """gamma of a relative width.

    Raises:
        ValueError: unless 0 < width < 12^(-1/2) = 0.289.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), appendix C.1: width^2 = (gamma + 1) /
    ((gamma + 2)^2 (gamma + 3)).

    Example:
        >>> round(exponent(0.05), 3), round(exponent(0.10), 3)
        (16.972, 6.937)
    """
    if not 1e-6 < width < LARGEST_WIDTH:
        raise ValueError(f"a relative width must be above 0 and below 0.289, got {width}.")
    low, high = 0.0, 2 / width  # the width falls as gamma rises
    for _ in range(100):
        middle = (low + high) / 2
        if (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def power_decay(gamma: float, step: int) -> float:
    """What the average keeps of itself at step 1, 2, ...: (1 - 1 / step)^(gamma + 1).

    Source: Karras et al. 2024 (EDM2), Eq. 127.

    Example:
        >>> power_decay(0.0, 1), power_decay(0.0, 4)
        (0.0, 0.75)
    """
    return float((1 - 1 / step) ** (gamma + 1))


def coefficients(
    steps: Sequence[float], gammas: Sequence[float], step: float, gamma: float
) -> Tensor:
    """Factors on snapshots whose sum comes nearest to another average.

    That is in the L2 distance of their profiles.

    Args:
        steps: (N,) at which the snapshots were taken.
        gammas: (N,) their exponents.
        step: of the average that is wanted, at most the last of the snapshots.
        gamma: its exponent.

    Returns:
        (N,) float64, with sum 1.

    Raises:
        ValueError: without snapshots, or for a step after the last.

    Source: Karras et al. 2024 (EDM2), section 3.2 and appendix C.2; formulas derived anew.

    Example:
        >>> coefficients([10, 20], [7.0, 7.0], 20, 7.0).round(decimals=6).abs().tolist()
        [0.0, 1.0]
    """
    if not steps or step > max(steps):
        raise ValueError(f"an average at step {step:g} needs a snapshot from then on, got {steps}.")
    t, g = torch.tensor(steps).double(), torch.tensor(gammas).double()
    gram = _inner(t[:, None], g[:, None], t, g)
    wanted = _inner(t, g, torch.tensor(step).double(), torch.tensor(gamma).double())
    # Neighbouring snapshots are nearly the same, and their matrix nearly singular.
    found = torch.linalg.lstsq(gram, wanted[:, None], rcond=1e-15, driver="gelsd").solution[:, 0]
    weights: Tensor = found / found.sum()
    return weights


def _inner(t_a: Tensor, gamma_a: Tensor, t_b: Tensor, gamma_b: Tensor) -> Tensor:
    """Integral of the product of two profiles, over the time that both have."""
    ratio = (t_a / t_b) ** torch.where(t_a < t_b, gamma_b, -gamma_a)
    scale = (gamma_a + gamma_b + 1) * torch.maximum(t_a, t_b)
    found: Tensor = (gamma_a + 1) * (gamma_b + 1) * ratio / scale
    return found
