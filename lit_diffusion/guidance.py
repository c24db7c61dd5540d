"""Steering samples towards their condition: wrappers from denoise to denoise.

One convention: output = unconditional + scale (conditional - unconditional), so 0 is unconditional,
1 conditional, more is guided.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_diffusion.gaussian import expand_as
from lit_diffusion.protocols import Condition, Denoise, Denoised, DenoiseFor, Process, by_part

LogProbGradient = Callable[[Tensor, Tensor, Any], Tensor]
"""(x_t, noise label as networks get it, labels) -> gradient of log p(labels | x_t) by x_t, scaled
as wanted; all of the batch."""


@dataclass(frozen=True)
class ClassifierFree:
    """Extrapolates from the prediction without labels through the one with them.

    Both come from one batched call of the network. A learned variance is that of the conditional
    half. Clipping comes after guidance, in the solver.

    Args:
        scale: 1 is conditional, 0 unconditional. Papers that write c + s (c - u) have s = scale -
            1.

    Raises:
        ValueError: for a scale that is not finite.

    Source: Ho & Salimans 2022 (classifier-free guidance), Eq. 6.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"guidance scale must be finite, got {self.scale}.")

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """A Denoise for these labels.

        Raises:
            ValueError: without labels, or without what stands for none.
        """
        if labels is None or null is None:
            raise ValueError(
                "classifier-free guidance needs labels, and what stands for none of them, got "
                f"{'no labels' if labels is None else 'no null'}; pass both, or guidance=None."
            )
        if self.scale == 1:
            return denoise_for(labels)
        if self.scale == 0:
            return denoise_for(null)
        return self._extrapolated(denoise_for, labels, null)

    def _extrapolated(self, denoise_for: DenoiseFor, labels: Condition, null: Condition) -> Denoise:
        denoise = denoise_for(by_part(lambda *halves: torch.cat(halves), labels, null))
        calls = 0

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            nonlocal calls
            both = denoise(torch.cat([x_t, x_t]), torch.cat([t, t]))
            (x0, x0_without), (noise, noise_without) = both.x0.chunk(2), both.noise.chunk(2)
            if calls == 0 and torch.equal(x0, x0_without) and _differ(labels, null):
                warnings.warn(
                    f"guidance with scale {self.scale} has no effect: the network predicts the "
                    "same with labels and without them. Either it is untrained, or its forward() "
                    "ignores its labels.",
                    stacklevel=2,
                )
            calls += 1
            return Denoised(
                x0=torch.lerp(x0_without, x0, self.scale),
                noise=torch.lerp(noise_without, noise, self.scale),
                logvar_frac=None if both.logvar_frac is None else both.logvar_frac.chunk(2)[0],
            )

        return guided


@dataclass(frozen=True)
class ClassifierShift:
    """Moves the mean of each ancestral step by its variance times a classifier's gradient.

    For the solver DDPM, which adds `Denoised.shift`.

    Args:
        gradient: of log p(labels | x_t).

    Source: Dhariwal & Nichol 2021 (guided-diffusion), algorithm 1.
    """

    gradient: LogProbGradient

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """A Denoise for these labels."""
        denoise = denoise_for(labels)

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            told = process.noise_label(t).float()
            return denoise(x_t, t)._replace(shift=self.gradient(x_t, told, labels))

        return guided


@dataclass(frozen=True)
class ClassifierScore:
    """Adds a classifier's gradient to the score, hence to the noise and x0; for any solver.

    Args:
        gradient: of log p(labels | x_t).
        clip: whether x0 is clamped to [-1, 1] before the gradient is added, as guided-diffusion
            does; the solver's own `clip`, which would clamp the guided x0 again, is then best off.

    Source: Dhariwal & Nichol 2021 (guided-diffusion), algorithm 2.
    """

    gradient: LogProbGradient
    clip: bool = True

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """A Denoise for these labels."""
        denoise = denoise_for(labels)

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            seen = denoise(x_t, t)
            alpha, sigma = (expand_as(v, x_t) for v in process.alpha_sigma(t))
            x0 = seen.x0.clamp(-1, 1) if self.clip else seen.x0
            gradient = self.gradient(x_t, process.noise_label(t).float(), labels)
            noise = (x_t - alpha * x0) / sigma - sigma * gradient
            return seen._replace(x0=(x_t - sigma * noise) / alpha, noise=noise)

        return guided


def _differ(labels: Any, null: Any) -> bool:
    if isinstance(labels, Tensor):
        return not torch.equal(labels, null)
    return any(map(_differ, labels, null))
