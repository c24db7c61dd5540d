"""Compute the decays and factors for EDM2's power-function averages of the weights.

At step t, the average is the integral of `p(tau) * parameters(tau)` over the steps tau in [0, t].
The profile p is the density

    p(tau) = (gamma + 1) * tau**gamma / t**(gamma + 1).

Users choose the relative width of the profile, and gamma is computed from this width. The relative
width is the standard deviation of the step tau under the density p, divided by the current step t.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

LARGEST_WIDTH = 1 / sqrt(12)
"""Relative width of the uniform profile, which has gamma = 0."""


def exponent(width: float) -> float:
    """Compute the exponent gamma of the profile with the given relative width.

    Raises:
        ValueError: unless `0 < width < 12**(-1/2)`, which is about 0.289.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), Eq. 123 (appendix C.4):
    `width**2 = (gamma + 1) / ((gamma + 2)**2 * (gamma + 3))`.

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
    """Compute the EMA decay `(1 - 1 / step)**(gamma + 1)` of a power-function average at a step.

    Args:
        gamma: exponent of the profile.
        step: optimizer step, counted from 1.

    Source: Karras et al. 2024 (EDM2), Eq. 127 (appendix C.4).

    Example:
        >>> power_decay(0.0, 1), power_decay(0.0, 4)
        (0.0, 0.75)
    """
    return float((1 - 1 / step) ** (gamma + 1))


def coefficients(
    steps: Sequence[float], gammas: Sequence[float], step: float, gamma: float
) -> tuple[Tensor, float]:
    """Compute the factors of a linear combination of snapshots that approximates a new average.

    A snapshot is a saved average of the weights. Let `p_i` be the profile of snapshot i and `p` the
    target profile, both as functions of the optimizer step. The factors `x_i` minimize the L2 norm
    `|sum_i x_i * p_i - p|`, subject to `sum_i x_i = 1`.

    Args:
        steps: (N,) optimizer steps at which the snapshots were saved.
        gammas: (N,) exponents of the snapshots' profiles.
        step: optimizer step of the target average, > 0 and not after the last snapshot.
        gamma: exponent of the target profile.

    Returns:
        A pair: the N factors as a float64 tensor, and the relative error
        `|sum_i x_i * p_i - p| / |p|`. The error is 0 if `p` is one of the `p_i`.

    Raises:
        ValueError: if there are no snapshots, or if `step` is after the last snapshot.

    Source: Karras et al. 2024 (EDM2), section 3.2, and Eq. 134 and 151 (appendix C.5). The paper
    does not constrain the sum of the factors. The formulas were derived independently of the
    authors' code.

    Example:
        >>> factors, distance = coefficients([10, 20], [7.0, 7.0], 20, 7.0)
        >>> factors.round(decimals=6).abs().tolist(), round(distance, 6)
        ([0.0, 1.0], 0.0)
    """
    if not steps or step > max(steps):
        raise ValueError(
            f"an average at step {step:g} needs a snapshot at or after this step, got {steps}."
        )
    t, g, goal, one = (
        torch.tensor(x, dtype=torch.float64) for x in ([s / step for s in steps], gammas, gamma, 1)
    )
    gram, target = _inner(t[:, None], g[:, None], t, g), _inner(t, g, one, goal)
    system = torch.ones(len(t) + 1, len(t) + 1, dtype=torch.float64)
    system[:-1, :-1], system[-1, -1] = gram, 0
    rhs = torch.cat([target, one[None]])[:, None]
    # Neighboring snapshots are nearly equal, so the matrix is nearly singular.
    factors = torch.linalg.lstsq(system, rhs, rcond=1e-15, driver="gelsd").solution[:-1, 0]
    error = 1 + (factors @ gram @ factors - 2 * factors @ target) / _inner(one, goal, one, goal)
    return factors, float(error.clamp(min=0).sqrt())


def _inner(t_a: Tensor, gamma_a: Tensor, t_b: Tensor, gamma_b: Tensor) -> Tensor:
    """Compute the integral over time of the product of two profiles."""
    ratio = (t_a / t_b) ** torch.where(t_a < t_b, gamma_b, -gamma_a)
    scale = (gamma_a + gamma_b + 1) * torch.maximum(t_a, t_b)
    return (gamma_a + 1) * (gamma_b + 1) * ratio / scale
