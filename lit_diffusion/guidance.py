"""Guidance: wrappers of a denoise function that make samples follow their condition more closely.

The guided prediction of `ClassifierFree` is
`unconditional + scale * (conditional - unconditional)`. With scale 0, the guided prediction is the
unconditional prediction, and with scale 1 the conditional prediction. Larger scales make samples
follow the condition more closely.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_diffusion.gaussian import expand_as
from lit_diffusion.protocols import Condition, Denoise, Denoised, DenoiseFor, Process, by_part

LogProbGradient = Callable[[Tensor, Tensor, Any], Tensor]
"""(x_t (B, C, H, W), t (B,) float64, labels) -> gradient (B, C, H, W) of log p(labels | x_t) with
respect to x_t, times the guidance scale."""


@dataclass(frozen=True)
class ClassifierFree:
    """Classifier-free guidance: extrapolates from the unconditional to the conditional prediction.

    One batched call of the network computes the conditional and the unconditional prediction. If
    the network learns the variance, the variance of the conditional prediction is used, and
    guidance does not change it. A solver that clips x0 clips the guided x0.

    Args:
        scale: factor on the difference between the predictions. With 0, samples are unconditional.
            With 1, they are conditional, without guidance. Some papers write the guided prediction
            as `c + s * (c - u)`, where c is the conditional and u the unconditional prediction.
            Their s equals `scale - 1`.
        interval: (low, high). Guidance is on at noise levels with `low < sigma / alpha <= high`. At
            other noise levels, only the conditional prediction is computed, at half the cost.
        rescale: strength of rescaling, in [0, 1]. With 1, each guided x0 is scaled to the standard
            deviation of the conditional x0. With 0, x0 is not scaled. Large guidance scales
            increase the contrast of images, and rescaling reduces this effect. A usual value is
            0.7.

    Raises:
        ValueError: if scale is not finite, if rescale is not in [0, 1], or if the interval does not
            satisfy `0 <= low < high`.

    Source: Ho & Salimans 2022 (classifier-free guidance), Eq. 6. The interval is from Kynkaanniemi
    et al. 2024 (arXiv 2404.07724), Eq. 6, and rescaling from Lin et al. 2023 (arXiv 2305.08891),
    Eq. 15-16. Lin et al. rescale the output of the network instead of x0.

    Example:
        >>> ClassifierFree(scale=2.0, interval=(0.2, 5.0)).scale
        2.0
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, math.inf)
    rescale: float = 0.0

    def __post_init__(self) -> None:
        _check_scale(self.scale, self.interval)
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"rescale must be in [0, 1], got {self.rescale}; 0.7 is usual.")

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function for these labels.

        Raises:
            ValueError: if labels or the null condition are None.
        """
        if labels is None or null is None:
            raise ValueError(
                "classifier-free guidance needs labels and the null condition, got "
                f"{'no labels' if labels is None else 'no null'}; pass both, or guidance=None."
            )
        if self.scale == 1:
            return denoise_for(labels)
        if self.scale == 0 and self.interval == (0, math.inf) and not self.rescale:
            return denoise_for(null)
        guided = self._extrapolate(denoise_for, labels, null, process)
        return _guide_within(self.interval, process, guided, denoise_for(labels))

    def _extrapolate(
        self, denoise_for: DenoiseFor, labels: Condition, null: Condition, process: Process
    ) -> Denoise:
        denoise = denoise_for(by_part(lambda *halves: torch.cat(halves), labels, null))
        calls = 0

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            nonlocal calls
            t_both = torch.cat([t, t])
            t_both.until = getattr(t, "until", None)  # type: ignore[attr-defined]
            both = denoise(torch.cat([x_t, x_t]), t_both)
            (x0, x0_uncond), (noise, noise_uncond) = both.x0.chunk(2), both.noise.chunk(2)
            if calls == 0 and torch.equal(x0, x0_uncond) and _differ(labels, null):
                warnings.warn(
                    f"guidance with scale {self.scale} has no effect: the network predicts the "
                    "same with labels and without them. Either it is untrained, or its forward() "
                    "ignores its labels.",
                    stacklevel=2,
                )
            calls += 1
            extrapolated = Denoised(
                x0=torch.lerp(x0_uncond, x0, self.scale),
                noise=torch.lerp(noise_uncond, noise, self.scale),
                logvar_frac=None if both.logvar_frac is None else both.logvar_frac.chunk(2)[0],
            )
            if not self.rescale:
                return extrapolated
            return self._rescale(extrapolated, x0, x_t, t, process)

        return guided

    def _rescale(
        self, guided: Denoised, conditional: Tensor, x_t: Tensor, t: Tensor, process: Process
    ) -> Denoised:
        ratio = conditional.flatten(1).std(1) / guided.x0.flatten(1).std(1)
        ratio = ratio.nan_to_num(1.0)  # 0 / 0 if both images are constant
        x0 = guided.x0 * expand_as(torch.lerp(torch.ones_like(ratio), ratio, self.rescale), x_t)
        alpha, sigma = (expand_as(v, x_t) for v in process.alpha_sigma(t))
        return guided._replace(x0=x0, noise=(x_t - alpha * x0) / sigma)


@dataclass(frozen=True)
class Autoguidance:
    """Autoguidance: extrapolates from a weaker model's prediction to this model's prediction.

    The weaker model should make errors of the same kind as this model, but larger errors. Then, the
    extrapolation reduces the errors. As the weaker model, use a smaller model, or a model that was
    trained for fewer steps. Because the weaker model gets the same labels as this model, samples
    improve without losing diversity, and training needs no label dropout.

    Args:
        weaker: the method `denoise_for` of the weaker module. The weaker module must have the same
            process as this model, and be on the same device.
        scale: factor on the difference between the predictions. With 1, the weaker model has no
            effect.
        interval: (low, high). Guidance is on at noise levels with `low < sigma / alpha <= high`. At
            other noise levels, only this model is used.

    Raises:
        ValueError: if scale is not finite, or if the interval does not satisfy `0 <= low < high`.

    Source: Karras et al. 2024 (Guiding a Diffusion Model with a Bad Version of Itself, arXiv
    2406.02507), Eq. 3 and section 4.
    """

    weaker: DenoiseFor = field(repr=False)
    scale: float = 2.0
    interval: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        _check_scale(self.scale, self.interval)

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function for these labels."""
        ours, weaker = denoise_for(labels), self.weaker(labels)

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            denoised, other = ours(x_t, t), weaker(x_t, t)
            return denoised._replace(
                x0=torch.lerp(other.x0, denoised.x0, self.scale),
                noise=torch.lerp(other.noise, denoised.noise, self.scale),
            )

        return _guide_within(self.interval, process, guided, ours)


def _check_scale(scale: float, interval: tuple[float, float]) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale must be finite, got {scale}.")
    if not (len(interval) == 2 and 0 <= interval[0] < interval[1]):
        raise ValueError(f"interval must be two levels, 0 <= low < high, got {interval}.")


def _guide_within(
    interval: tuple[float, float], process: Process, guided: Denoise, otherwise: Denoise
) -> Denoise:
    """Use `guided` if the noise level of the batch is in the interval, else use `otherwise`.

    All images of a batch must have the same noise level.
    """
    if interval == (0, math.inf):
        return guided

    def guided_within(x_t: Tensor, t: Tensor) -> Denoised:
        time = getattr(t, "time", None)  # set by `solvers.steps.batch_of`; t[0] waits for a GPU
        t_0 = t[0] if time is None else torch.tensor(time, dtype=t.dtype)
        alpha, sigma = process.alpha_sigma(t_0)
        is_inside = interval[0] < float(sigma / alpha) <= interval[1]
        return (guided if is_inside else otherwise)(x_t, t)

    return guided_within


@dataclass(frozen=True)
class ClassifierShift:
    """Classifier guidance that adds `variance * gradient` to the mean of each reverse step.

    This class works only with `DDPM`, because no other solver reads the gradient from
    `Denoised.shift`.

    Args:
        gradient: function of x_t, t and labels that returns the gradient of
            `log p(labels | x_t)` with respect to x_t, times the guidance scale. The method
            `gradient` of `NoisyClassifier` creates this function.

    Source: Dhariwal & Nichol 2021 (guided-diffusion), algorithm 1.

    Example:
        >>> guidance = ClassifierShift(gradient=lambda x_t, t, labels: torch.zeros_like(x_t))
    """

    gradient: LogProbGradient = field(repr=False)

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function for these labels."""
        denoise = denoise_for(labels)

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            return denoise(x_t, t)._replace(shift=self.gradient(x_t, t, labels))

        return guided


@dataclass(frozen=True)
class ClassifierScore:
    """Classifier guidance that adds the gradient to the score, for any solver.

    With the gradient of `log p(labels | x_t)`, the predicted noise becomes
    `noise - sigma * gradient`, and the predicted x0 becomes `x0 + sigma**2 / alpha * gradient`. At
    pure noise, alpha is 0, and the change of x0 would be infinite. Therefore, `DiffusionModule`
    raises an error if the solver's grid starts at pure noise.

    Args:
        gradient: function of x_t, t and labels that returns the gradient of
            `log p(labels | x_t)` with respect to x_t, times the guidance scale. The method
            `gradient` of `NoisyClassifier` creates this function.
        clip: whether x0 is clamped to [-1, 1] before the gradient is added, as in guided-diffusion.
            If True, set `clip=False` in the solver, which would otherwise clamp the guided x0
            again.

    Source: Dhariwal & Nichol 2021 (guided-diffusion), algorithm 2.

    Example:
        >>> guidance = ClassifierScore(gradient=lambda x_t, t, labels: torch.zeros_like(x_t))
    """

    gradient: LogProbGradient = field(repr=False)
    clip: bool = True

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function for these labels."""
        denoise = denoise_for(labels)

        def guided(x_t: Tensor, t: Tensor) -> Denoised:
            denoised = denoise(x_t, t)
            alpha, sigma = (expand_as(v, x_t) for v in process.alpha_sigma(t))
            x0 = denoised.x0.clamp(-1, 1) if self.clip else denoised.x0
            noise = (x_t - alpha * x0) / sigma - sigma * self.gradient(x_t, t, labels)
            return denoised._replace(x0=(x_t - sigma * noise) / alpha, noise=noise)

        return guided


def _differ(labels: Any, null: Any) -> bool:
    """Whether two conditions have different values."""
    if isinstance(labels, Tensor):
        return not torch.equal(labels, null)
    return any(map(_differ, labels, null))
