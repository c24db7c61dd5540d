"""Losses of each sample, and weightings of the squared error.

`DiffusionModule.per_sample_loss` multiplies the squared error of the network's output by the weight
from a weighting. Then it passes the product to a loss, which may add terms.

The docstrings of the weightings, except `Simple`, describe the weight W on the squared error of x0,
because W does not depend on the parameterization. The method `weight` of a weighting returns the
weight on the squared error of the output, which is `W * output_scale**2`. Both weights give the
same loss, because every parameterization has the form
`x0 = (terms without the output) +- output_scale * output`. The SNR is `(alpha / sigma)**2`.
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
    """Weight 1 on the squared error of the network's output, for every parameterization.

    Source: Ho et al. 2020 (DDPM), Eq. 14.

    Example:
        >>> alpha, sigma = torch.tensor([0.8, 0.6]), torch.tensor([0.6, 0.8])
        >>> Simple().weight(alpha, sigma, sigma / alpha, None)
        tensor([1., 1.])
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return the weight 1."""
        return torch.ones_like(alpha)


@dataclass(frozen=True)
class MinSNR:
    """Min-SNR weighting: `W = min(SNR, gamma)`.

    On a variance-preserving process, the weight on the squared error of the output is
    `min(SNR, gamma) / SNR` with `Epsilon`, and `min(SNR, gamma) / (SNR + 1)` with `Velocity`.

    Args:
        gamma: SNR above which W is constant.
        zero_snr_weight: weight on the squared error of the output at an SNR of 0. None keeps the
            Min-SNR weight, which is 0 at an SNR of 0 with `Sample` and `Velocity`. The authors'
            code uses 1.0.

    Source: Hang et al. 2023 (Min-SNR, arXiv 2303.09556), section 3.4.

    Example:
        >>> alpha, sigma = torch.tensor([0.5, 0.9]), torch.tensor([0.5, 0.1])  # SNR 1 and 81
        >>> MinSNR(gamma=5.0).weight(alpha, sigma, torch.ones(2), None)
        tensor([1., 5.])
    """

    gamma: float = 5.0
    zero_snr_weight: float | None = None

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `min(SNR, gamma) * output_scale**2`."""
        snr = (alpha / sigma) ** 2
        weight = snr.clamp(max=self.gamma) * output_scale**2
        if self.zero_snr_weight is None:
            return weight
        return torch.where(snr == 0, self.zero_snr_weight, weight)


@dataclass(frozen=True)
class P2:
    """P2 weighting: `W = SNR / (k + SNR)**gamma`.

    P2 gives nearly clean images less weight than `W = SNR` does. With `Epsilon`, `W = SNR` is the
    same weighting as `Simple`.

    Args:
        gamma: exponent of the denominator. A larger gamma gives nearly clean images less weight.
            The authors use 0.5 and 1. With 0, W equals the SNR.
        k: SNR above which W grows more slowly than the SNR. Far below k, W is about
            proportional to the SNR.

    Source: Choi et al. 2022 (P2 weighting, arXiv 2204.00227), Eq. 8.

    Example:
        >>> alpha, sigma = torch.tensor([0.5, 0.9]), torch.tensor([0.5, 0.1])  # SNR 1 and 81
        >>> P2().weight(alpha, sigma, sigma / alpha, None)
        tensor([0.5000, 0.0122])
    """

    gamma: float = 1.0
    k: float = 1.0

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `SNR / (k + SNR)**gamma * output_scale**2`."""
        snr = (alpha / sigma) ** 2
        return snr / (self.k + snr) ** self.gamma * output_scale**2


@dataclass(frozen=True)
class SoftMinSNR:
    """Soft-min-SNR weighting: `W = SNR * gamma / (SNR + gamma)`, a smooth version of `MinSNR`.

    Args:
        gamma: limit of W as the SNR increases. k-diffusion uses `1 / sigma_data**2`, with the
            sigma_data of `EDMPreconditioning`.

    Source: Crowson et al. 2024 (HDiT, arXiv 2401.11605), soft-min-SNR.

    Example:
        >>> alpha, sigma = torch.tensor([0.5, 0.9]), torch.tensor([0.5, 0.1])  # SNR 1 and 81
        >>> SoftMinSNR(gamma=4.0).weight(alpha, sigma, torch.ones(2), None)
        tensor([0.8000, 3.8118])
    """

    gamma: float = 4.0

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `SNR * gamma / (SNR + gamma) * output_scale**2`."""
        snr = (alpha / sigma) ** 2
        return snr * self.gamma / (snr + self.gamma) * output_scale**2


@dataclass(frozen=True)
class TruncSNR:
    """Truncated SNR weighting: `W = max(SNR, 1)`.

    If the SNR is above 1, the squared error of the noise has the weight 1. If the SNR is below 1,
    the squared error of x0 has the weight 1.

    Source: Salimans & Ho 2022 (progressive distillation), section 4, "truncated SNR".

    Example:
        >>> alpha, sigma = torch.tensor([0.1, 0.8]), torch.tensor([0.5, 0.4])  # SNR 0.04 and 4
        >>> TruncSNR().weight(alpha, sigma, torch.ones(2), None)
        tensor([1., 4.])
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `max(SNR, 1) * output_scale**2`."""
        return ((alpha / sigma) ** 2).clamp(min=1) * output_scale**2


@dataclass(frozen=True)
class InvSNR:
    """Inverse SNR weighting: `W = 1 / SNR`, which gives noisy images the largest weight.

    The SNR of the noisiest time must be above 0, because W would be infinite at an SNR of 0.

    Source: Hang et al. 2023 (Min-SNR, arXiv 2303.09556), `inv_snr` in the authors' code.

    Example:
        >>> alpha, sigma = torch.tensor([0.5, 0.8]), torch.tensor([0.5, 0.4])  # SNR 1 and 4
        >>> InvSNR().weight(alpha, sigma, torch.ones(2), None)
        tensor([1.0000, 0.2500])
    """

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `(sigma * output_scale / alpha)**2`."""
        return (sigma / alpha * output_scale) ** 2


@dataclass(frozen=True)
class AsFlow:
    """Flow weighting: `W = ((alpha + sigma) / sigma)**2`.

    The error of the flow velocity is `(alpha + sigma) / sigma` times the error of x0. Therefore,
    this W trains every parameterization on the squared error of the flow velocity. For example,
    with `Sample` on `LinearFlow`, the network outputs x0 and is trained on the error of the
    velocity `(x_t - x0) / t`.

    Args:
        floor: lower bound on `sigma / (alpha + sigma)` in W, so that W is at most `1 / floor**2`.
            On `LinearFlow`, `sigma / (alpha + sigma)` equals t.

    Source: Li & He 2025 (JiT, arXiv 2511.13720), table 1 and section 4, with t clipped at 0.05.

    Example:
        >>> alpha, sigma = torch.tensor([0.5, 0.75]), torch.tensor([0.5, 0.25])  # t = 1/2 and 1/4
        >>> AsFlow().weight(alpha, sigma, torch.ones(2), None)
        tensor([ 4., 16.])
    """

    floor: float = 0.05

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `(output_scale / max(sigma / (alpha + sigma), floor))**2`."""
        return (output_scale / (sigma / (alpha + sigma)).clamp(min=self.floor)) ** 2


@dataclass(frozen=True)
class FDMWarmup:
    """Warm-up of the Fast Diffusion Model (FDM): an upper bound on another weighting.

    With `K = warmup_steps`, W is at most `C(k) = 5 * 100**(k / K)` at optimizer step k < K. This
    bound rises from 5 to 500. From step K on, and in validation, W has no upper bound.

    Args:
        base: the weighting whose W is bounded. FDM uses `Simple`.
        warmup_steps: number of optimizer steps in which W is bounded. The authors use 400, except
            with EDM on CIFAR-10 (200) and on FFHQ (800).

    Raises:
        ValueError: if warmup_steps < 1.

    Source: Wu et al. 2023 (Fast Diffusion Model, arXiv 2306.06991). The formula for C is from the
    authors' code, in which k counts calls of the loss instead of optimizer steps.

    Example:
        >>> [FDMWarmup(Simple(), 200).bound(step) for step in (0, 100, 200, None)]
        [5.0, 50.0, inf, inf]
    """

    base: Weighting
    warmup_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, got {self.warmup_steps}; for no warm-up, use "
                f"{self.base} alone."
            )

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Return `min(base_weight, C * output_scale**2)`."""
        weight = self.base.weight(alpha, sigma, output_scale, step)
        bound = self.bound(step)
        return weight if bound == math.inf else weight.minimum(bound * output_scale**2)

    def bound(self, step: int | None) -> float:
        """Return the bound C after `step` optimizer steps; inf if `step` is None."""
        if step is None or step >= self.warmup_steps:
            return math.inf
        return 5.0 * math.pow(100.0, step / self.warmup_steps)


@dataclass(frozen=True)
class DenoisingLoss:
    """The weighted squared error alone: `weight(t) * mean((target - output)**2)`.

    Args:
        weighting: factor on the squared error.

    Source: Ho et al. 2020 (DDPM), Eq. 12 and 14.

    Example:
        >>> DenoisingLoss(weighting=MinSNR(gamma=5.0)).output_factor
        1
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
        """Return the weighted errors (B,) unchanged."""
        return weighted_error


class UncertaintyLoss(nn.Module):
    """EDM2's loss: `weight(t) * mean((target - output)**2) * exp(-u(t)) + u(t)`, with a learned u.

    The loss is lowest if u(t) is the logarithm of the expected weighted error at t. Then, the first
    term of the loss is 1 on average at every t, so all noise levels contribute equally. The
    function u is linear in Fourier features of `ln(sigma / alpha) / 4`. At initialization, u is 0,
    and the loss equals `DenoisingLoss`. The weights of u are trained and saved with the network.

    Args:
        weighting: factor on the squared error.
        num_features: number of Fourier features of the noise level.

    Raises:
        ValueError: if num_features < 1.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), Eq. 21 (appendix B.2); Kendall et al. 2018,
    Eq. 7.

    Example:
        >>> loss = UncertaintyLoss(Simple(), num_features=16)
        >>> scales = torch.tensor([0.6, 0.8], dtype=torch.float64)
        >>> loss.uncertainty(scales, 1 - scales).tolist()  # at initialization
        [0.0, 0.0]
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
        """Compute the losses (B,) from the weighted errors (B,)."""
        u = self.uncertainty(prediction.alpha, prediction.sigma).to(weighted_error.dtype)
        return weighted_error * (-u).exp() + u

    def uncertainty(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Compute u at the signal and noise scales. All have the shape (B,)."""
        c_noise = (sigma / alpha).log().clamp(-20, 20)[:, None] / 4  # finite at pure noise
        angles = 2 * math.pi * (self.frequencies * c_noise.to(self.frequencies.dtype) + self.phases)
        return math.sqrt(2 / len(self.phases)) * angles.cos() @ self.log_variance


@dataclass(frozen=True)
class HybridLoss:
    """Improved-diffusion's loss `L_simple + lambda * L_vlb`, which also trains the variance.

    L_simple is the loss of `DenoisingLoss`, and L_vlb is the variational bound. For images with C
    channels, the network outputs 2C channels. The first C channels are the output that the
    parameterization defines. The other C channels are values r, mostly in [-1, 1]. They set the
    variance of the reverse step: `(r + 1) / 2` is the argument `frac` of `LearnedRange`. L_vlb
    trains only the values r, because the first C channels are detached in it. The process must have
    discrete steps.

    Args:
        weighting: factor on the squared error in L_simple. The weighting does not affect L_vlb.
        vb_weight: the factor lambda. The paper uses 0.001, which corresponds to
            `rescale_learned_sigmas=True` in the authors' code. The models of guided-diffusion used
            `1 / T`.

    Raises:
        ValueError: if vb_weight <= 0.

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 15-16.

    Example:
        >>> HybridLoss(weighting=Simple(), vb_weight=0.001).output_factor
        2
    """

    weighting: Weighting
    vb_weight: float = 0.001
    output_factor: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 0 < self.vb_weight < math.inf:
            raise ValueError(
                f"vb_weight must be > 0, got {self.vb_weight}; to train without L_vlb, use "
                "DenoisingLoss."
            )

    def per_sample(
        self,
        weighted_error: Tensor,
        prediction: Prediction,
        process: Process,
        parameterization: Parameterization,
        /,
    ) -> Tensor:
        """Compute the losses (B,) from the weighted errors (B,)."""
        assert process.num_steps is not None  # checked by DiffusionModule
        bound = self.bound_term(prediction, process, parameterization)
        return weighted_error + self.vb_weight * process.num_steps * bound

    def bound_term(
        self, prediction: Prediction, process: Process, parameterization: Parameterization
    ) -> Tensor:
        """Compute the term of L_vlb at the time of each sample, in bits per dimension.

        The result has the shape (B,).
        """
        x0, x_t, r = prediction.x0, prediction.x_t, prediction.variance_output
        assert r is not None
        posterior = step_posterior(process, prediction.t, x0.dtype)
        alpha, sigma = expand_as(prediction.alpha, x0), expand_as(prediction.sigma, x0)
        x0_hat = parameterization.to_x0(prediction.output.detach(), x_t, alpha, sigma)
        log_beta, log_posterior = posterior.log_beta, posterior.log_variance
        log_variance = LearnedRange().log_variance(
            expand_as(log_beta, x0), expand_as(log_posterior, x0), posterior.last, (r + 1) / 2
        )
        return variational_term(posterior, x0, x_t, x0_hat, log_variance)
