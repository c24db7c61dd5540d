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
) -> tuple[Tensor, float]:
    """Factors on snapshots whose sum comes nearest to another average, and how near that is.

    With profiles p_i and the wanted p, it minimises |sum x_i p_i - p|, the L2 norm over time, for
    factors x_i of sum 1 (by a Lagrange multiplier).

    Args:
        steps: (N,) at which the snapshots were taken.
        gammas: (N,) their exponents.
        step: of the average that is wanted, > 0 and at most the last of the snapshots.
        gamma: its exponent.

    Returns:
        The factors, (N,) float64; and the distance left over |p|, 0 where p is one of theirs. A
        profile whose width is an eighth off is 0.1 away.

    Raises:
        ValueError: without snapshots, or for a step after the last.

    Source: Karras et al. 2024 (EDM2), section 3.2 and appendix C.2; formulas derived anew.

    Example:
        >>> factors, distance = coefficients([10, 20], [7.0, 7.0], 20, 7.0)
        >>> factors.round(decimals=6).abs().tolist(), round(distance, 6)
        ([0.0, 1.0], 0.0)
    """
    if not steps or step > max(steps):
        raise ValueError(f"an average at step {step:g} needs a snapshot from then on, got {steps}.")
    t, g, goal, one = (
        torch.tensor(x, dtype=torch.float64) for x in ([s / step for s in steps], gammas, gamma, 1)
    )
    gram, wanted = _inner(t[:, None], g[:, None], t, g), _inner(t, g, one, goal)
    system = torch.ones(len(t) + 1, len(t) + 1, dtype=torch.float64)
    system[:-1, :-1], system[-1, -1] = gram, 0
    right = torch.cat([wanted, one[None]])[:, None]
    # Neighbouring snapshots are nearly the same, and their matrix nearly singular.
    factors = torch.linalg.lstsq(system, right, rcond=1e-15, driver="gelsd").solution[:-1, 0]
    left = 1 + (factors @ gram @ factors - 2 * factors @ wanted) / _inner(one, goal, one, goal)
    return factors, float(left.clamp(min=0).sqrt())


def _inner(t_a: Tensor, gamma_a: Tensor, t_b: Tensor, gamma_b: Tensor) -> Tensor:
    """Integral of the product of two profiles, over the time that both have."""
    ratio = (t_a / t_b) ** torch.where(t_a < t_b, gamma_b, -gamma_a)
    scale = (gamma_a + gamma_b + 1) * torch.maximum(t_a, t_b)
    product: Tensor = (gamma_a + 1) * (gamma_b + 1) * ratio / scale
    return product
