"""Training objectives, per sample, and the weightings of the squared error.

`DiffusionModule.per_sample_loss` multiplies the squared error of the network's output by a
weighting and hands the product to a loss, which may add terms.

One rule serves every parameterization: x0 = (something) + output_scale * output, so a weight W on
|x0 - x0_hat|^2 is a weight W output_scale^2 on |target - output|^2. Weightings are stated as W,
with SNR = (alpha / sigma)^2; `Simple` alone is stated for the output.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_diffusion.gaussian import LearnedRange, expand_as, step_posterior, variational_term
from lit_diffusion.protocols import Parameterization, Prediction, Process, Weighting


@dataclass(frozen=True)
class Simple:
    """Weight 1 on the error of the output, whatever that is.

    Source: Ho et al. 2020 (DDPM), Eq. 14.
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """1."""
        return torch.ones_like(alpha)


@dataclass(frozen=True)
class MinSNR:
    """W = min(SNR, gamma).

    That is min(SNR, gamma) / SNR for noise, min(SNR, gamma) / (SNR + 1) for velocity.

    Args:
        gamma: where the weight of clean images stops growing.
        zero_snr_weight: weight at SNR = 0, where the formula gives 0 for Sample and Velocity; the
            authors' code has 1.0 there. None keeps the formula.

    Source: Hang et al. 2023 (Min-SNR, arXiv 2303.09556), section 3.4.
    """

    gamma: float = 5.0
    zero_snr_weight: float | None = None

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """min(SNR, gamma) output_scale^2."""
        snr = (alpha / sigma) ** 2
        weight = snr.clamp(max=self.gamma) * output_scale**2
        if self.zero_snr_weight is None:
            return weight
        return torch.where(snr == 0, self.zero_snr_weight, weight)


@dataclass(frozen=True)
class P2:
    """W = SNR / (k + SNR)^gamma: takes weight off the nearly clean images.

    Args:
        gamma: strength; 0 is Simple for noise. The authors use 0.5 and 1.
        k: SNR at which it sets in.

    Source: Choi et al. 2022 (P2 weighting, arXiv 2204.00227), Eq. 8.
    """

    gamma: float = 1.0
    k: float = 1.0

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """SNR / (k + SNR)^gamma output_scale^2."""
        snr = (alpha / sigma) ** 2
        return snr / (self.k + snr) ** self.gamma * output_scale**2


@dataclass(frozen=True)
class SoftMinSNR:
    """W = SNR gamma / (SNR + gamma): Min-SNR without the corner.

    Args:
        gamma: where the weight of clean images stops growing; 1 / sigma_data^2 of
            `EDMPreconditioning` in k-diffusion.

    Source: Crowson et al. 2024 (HDiT, arXiv 2401.11605), soft-min-SNR.
    """

    gamma: float = 4.0

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """SNR gamma / (SNR + gamma) output_scale^2."""
        snr = (alpha / sigma) ** 2
        return snr * self.gamma / (snr + self.gamma) * output_scale**2


@dataclass(frozen=True)
class TruncSNR:
    """W = max(SNR, 1): that of the noise, but pure noise counts too.

    Source: Salimans & Ho 2022 (progressive distillation), section 4, "truncated SNR".
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """max(SNR, 1) output_scale^2."""
        return ((alpha / sigma) ** 2).clamp(min=1) * output_scale**2


@dataclass(frozen=True)
class InvSNR:
    """W = 1 / SNR: noisy images count most; for processes whose noisiest time has signal left.

    Source: Hang et al. 2023 (Min-SNR, arXiv 2303.09556), the authors' `inv_snr`.
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """(sigma output_scale / alpha)^2."""
        return (sigma / alpha * output_scale) ** 2


@dataclass(frozen=True)
class AsFlow:
    """W = ((alpha + sigma) / sigma)^2: the error of `FlowVelocity`, whatever the network outputs.

    With `Sample` on `LinearFlow`: networks that output the image and are trained by its velocity,
    (x_t - x0) / t.

    Args:
        floor: least sigma / (alpha + sigma) to divide by, as (t of LinearFlow).

    Source: Li & He 2025 (JiT, arXiv 2511.13720), table 1 and section 4, with t clipped at 0.05.
    """

    floor: float = 0.05

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """(output_scale (alpha + sigma) / sigma)^2."""
        return (output_scale / (sigma / (alpha + sigma)).clamp(min=self.floor)) ** 2


@dataclass(frozen=True)
class FDMWarmup:
    """Another weighting, held down at the start of training: W <= C(k) by optimizer step k.

    C rises from 5 to 500 as C(k) = 5 * 100^(k / K); from step K on, and where there is no training,
    as in validation, nothing is held down.

    Args:
        base: the weighting to come to, as in FDM `Simple`.
        warmup_steps: K. The authors use 200 (EDM) and 400 (VP, VE) for CIFAR-10, 800 and 400 for
            FFHQ, 400 for AFHQ.

    Raises:
        ValueError: for less than one step.

    Source: Wu et al. 2023 (Fast Diffusion Model, arXiv 2306.06991); C as in their code, which
    counts calls of the loss where this counts optimizer steps.

    Example:
        >>> [FDMWarmup(Simple(), 200).bound(step) for step in (0, 100, 200, None)]
        [5.0, 50.0, inf, inf]
    """

    base: Weighting
    warmup_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, got {self.warmup_steps}; without a warm-up, use "
                f"{self.base} alone."
            )

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """min(the base's, C output_scale^2)."""
        weight = self.base.weight(alpha, sigma, output_scale, step)
        bound = self.bound(step)
        return weight if bound == math.inf else weight.minimum(bound * output_scale**2)

    def bound(self, step: int | None) -> float:
        """C: the largest weight of an error of x0 after so many optimizer steps; None is inf."""
        if step is None or step >= self.warmup_steps:
            return math.inf
        return 5.0 * math.pow(100.0, step / self.warmup_steps)


@dataclass(frozen=True)
class DenoisingLoss:
    """The weighted squared error alone: weight(t) mean |target - output|^2.

    Args:
        weighting: factor on the squared error.

    Source: Ho et al. 2020 (DDPM), Eq. 12 and 14.
    """

    weighting: Weighting
    output_factor: ClassVar[int] = 1

    def per_sample(
        self,
        weighted_error: Tensor,
        prediction: Prediction,
        process: Process,
        parameterization: Parameterization,
        /,
    ) -> Tensor:
        """The (B,) weighted errors as they are."""
        return weighted_error


class UncertaintyLoss(nn.Module):
    """weight(t) mean |target - output|^2 exp(-u(t)) + u(t), with a learned log-variance u.

    Where the loss is large, u grows to its logarithm, so that every noise level comes to weigh the
    same. u is linear in Fourier features of ln(sigma / alpha) / 4 and is 0 at initialization, where
    the loss is that of `DenoisingLoss`. u is trained with the network and saved with it.

    Args:
        weighting: factor on the squared error.
        num_features: number of Fourier features of the noise level.

    Raises:
        ValueError: for less than one feature.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), Eq. 14 and appendix B.2; Kendall et al.
    2018, Eq. 8.
    """

    output_factor: ClassVar[int] = 1

    def __init__(self, weighting: Weighting, num_features: int = 128) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}.")
        self.weighting = weighting
        self.frequencies: Tensor
        self.phases: Tensor
        generator = torch.Generator().manual_seed(0)  # the same in every run
        self.register_buffer("frequencies", torch.randn(num_features, generator=generator))
        self.register_buffer("phases", torch.rand(num_features, generator=generator))
        self.log_variance = nn.Parameter(torch.zeros(num_features))

    def per_sample(
        self,
        weighted_error: Tensor,
        prediction: Prediction,
        process: Process,
        parameterization: Parameterization,
        /,
    ) -> Tensor:
        """(B,) weighted errors -> (B,) losses."""
        u = self.uncertainty(prediction.alpha, prediction.sigma).to(weighted_error.dtype)
        return weighted_error * (-u).exp() + u

    def uncertainty(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """(B,) u at signal and noise scales (B,) float64."""
        c_noise = (sigma / alpha).log().clamp(-20, 20)[:, None] / 4  # pure noise is infinite
        angles = 2 * math.pi * (self.frequencies * c_noise.to(self.frequencies.dtype) + self.phases)
        u: Tensor = math.sqrt(2 / len(self.phases)) * angles.cos() @ self.log_variance
        return u


@dataclass(frozen=True)
class HybridLoss:
    """L_simple + lambda L_vlb: denoising, plus a little of the bound, which trains the variance.

    The network outputs 2C channels: the first C as elsewhere, the others r in about [-1, 1], with
    (r + 1) / 2 the fraction of `LearnedRange`. The bound sees the first C with their gradient
    stopped. Needs a process in discrete steps.

    Args:
        weighting: factor on the squared error; the bound is not weighted.
        vb_weight: lambda. 0.001 is the paper's and `rescale_learned_sigmas=True` of the code;
            guided-diffusion's models used 1 / T.

    Raises:
        ValueError: unless vb_weight > 0.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), Eq. 15-16.
    """

    weighting: Weighting
    vb_weight: float = 0.001
    output_factor: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 0 < self.vb_weight < math.inf:
            raise ValueError(
                f"vb_weight must be > 0, got {self.vb_weight}; DenoisingLoss is without the bound."
            )

    def per_sample(
        self,
        weighted_error: Tensor,
        prediction: Prediction,
        process: Process,
        parameterization: Parameterization,
        /,
    ) -> Tensor:
        """(B,) weighted errors -> (B,) losses."""
        assert process.num_steps is not None  # checked by DiffusionModule
        bound = self.bound_term(prediction, process, parameterization)
        return weighted_error + self.vb_weight * process.num_steps * bound

    def bound_term(
        self, prediction: Prediction, process: Process, parameterization: Parameterization
    ) -> Tensor:
        """(B,) terms of the variational bound, in bits per dimension, at each sample's own step."""
        x0, x_t, r = prediction.x0, prediction.x_t, prediction.variance_output
        assert r is not None
        step = step_posterior(process, prediction.t)
        alpha, sigma = expand_as(prediction.alpha, x0), expand_as(prediction.sigma, x0)
        x0_hat = parameterization.to_x0(prediction.output.detach(), x_t, alpha, sigma)
        log_variance = LearnedRange().log_variance(
            expand_as(step.log_beta, x0), expand_as(step.log_variance, x0), step.last, (r + 1) / 2
        )
        return variational_term(step, x0, x_t, x0_hat, log_variance)
