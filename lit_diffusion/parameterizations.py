"""Parameterizations: what the network outputs, and how to recover x0 from it.

The noised image is `x_t = alpha * x0 + sigma * noise`. In every class, the method `target` computes
the training target from x0 and the noise, and `to_x0` estimates x0 from x_t and the network's
output.

Images are (B, C, H, W). The scales alpha and sigma have the dtype of the images and broadcast
against the images (see `gaussian.expand_as`). The method `output_scale` returns
`abs(d x0 / d output)`, which EDM calls c_out. The weightings in losses.py use this scale to convert
a weight on the error of x0 to a weight on the error of the output.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Parameterization


@dataclass(frozen=True)
class Epsilon:
    """The network outputs the noise. The estimate of x0 is ill-conditioned if alpha is close to 0.

    Source: Ho et al. 2020 (DDPM), Eq. 11-14.

    Example:
        >>> alpha, sigma = torch.tensor(0.8), torch.tensor(0.6)
        >>> x0, noise = torch.tensor(1.0), torch.tensor(2.0)
        >>> output = Epsilon().target(x0, noise, alpha, sigma)
        >>> Epsilon().to_x0(output, alpha * x0 + sigma * noise, alpha, sigma)
        tensor(1.0000)
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the noise."""
        return noise

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `(x_t - sigma * output) / alpha`."""
        return (x_t - sigma * output) / alpha

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `sigma / alpha`."""
        return sigma / alpha


@dataclass(frozen=True)
class Sample:
    """The network outputs the clean image x0.

    Source: Ho et al. 2020 (DDPM), section 3.2.

    Example:
        >>> alpha, sigma = torch.tensor(0.8), torch.tensor(0.6)
        >>> Sample().target(torch.tensor(1.0), torch.tensor(2.0), alpha, sigma)
        tensor(1.)
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return x0."""
        return x0

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the output."""
        return output

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return 1."""
        return torch.ones_like(alpha)


@dataclass(frozen=True)
class Velocity:
    """The network outputs `v = alpha * noise - sigma * x0`.

    The estimate of x0 is well-conditioned at all times.

    Source: Salimans & Ho 2022 (progressive distillation), section 4 and appendix D.

    Example:
        >>> alpha, sigma = torch.tensor(0.8), torch.tensor(0.6)
        >>> Velocity().target(torch.tensor(1.0), torch.tensor(2.0), alpha, sigma)
        tensor(1.)
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the velocity `alpha * noise - sigma * x0`."""
        return alpha * noise - sigma * x0

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `(alpha * x_t - sigma * output) / (alpha**2 + sigma**2)`."""
        return (alpha * x_t - sigma * output) / (alpha**2 + sigma**2)

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `c_out = sigma / (alpha**2 + sigma**2)`."""
        return sigma / (alpha**2 + sigma**2)


@dataclass(frozen=True)
class FlowVelocity:
    """The network outputs `u = noise - x0`, the velocity `d x_t / dt` of `LinearFlow`.

    Source: Lipman et al. 2023 (Flow Matching, arXiv 2210.02747), Eq. 23, with time reversed; Liu et
    al. 2023 (Rectified Flow), Eq. 1.

    Example:
        >>> alpha, sigma = torch.tensor(0.75), torch.tensor(0.25)
        >>> FlowVelocity().target(torch.tensor(1.0), torch.tensor(3.0), alpha, sigma)
        tensor(2.)
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return x_t."""
        return x_t

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the velocity `noise - x0`."""
        return noise - x0

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `(x_t - sigma * output) / (alpha + sigma)`."""
        return (x_t - sigma * output) / (alpha + sigma)

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `c_out = sigma / (alpha + sigma)`."""
        return sigma / (alpha + sigma)


@dataclass(frozen=True)
class EDMPreconditioning:
    """The network outputs EDM's F: the error of a linear estimate of x0, scaled to variance 1.

    The estimate of x0 is `D = c_skip * x_t + c_out * F(c_in * x_t)`, where `c_skip * x_t` is the
    best linear estimate of x0 from x_t. EDM has alpha = 1, but this class works for any alpha. With
    the variance `V = alpha**2 * sigma_data**2 + sigma**2` of x_t, the factors are

        c_in = 1 / sqrt(V),  c_skip = alpha * sigma_data**2 / V,
        c_out = sigma * sigma_data / sqrt(V).

    On a variance-preserving process with sigma_data = 1, F equals -v (see `Velocity`). EDM weights
    the squared error of x0 with `1 / c_out**2`. This is the same as a weight of 1 on the squared
    error of F, so use `Simple` to train with EDM's loss. `EDMProcess.noise_label` returns EDM's
    c_noise.

    Args:
        sigma_data: standard deviation of x0.

    Raises:
        ValueError: if sigma_data <= 0.

    Source: Karras et al. 2022 (EDM), Eq. 7 and table 1; appendix B.6.

    Example:
        >>> edm, alpha, sigma = EDMPreconditioning(0.5), torch.tensor(1.0), torch.tensor(0.5)
        >>> x0, noise = torch.tensor(0.3), torch.tensor(-1.0)
        >>> output = edm.target(x0, noise, alpha, sigma)
        >>> edm.to_x0(output, alpha * x0 + sigma * noise, alpha, sigma)
        tensor(0.3000)
    """

    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.sigma_data < math.inf:
            raise ValueError(f"0 < sigma_data < inf must hold, got {self.sigma_data}.")

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `x_t / sqrt(V)`."""
        return x_t / self._variance(alpha, sigma).sqrt()

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `(sigma / sigma_data * x0 - alpha * sigma_data * noise) / sqrt(V)`."""
        std = self._variance(alpha, sigma).sqrt()
        return (sigma / self.sigma_data * x0 - alpha * self.sigma_data * noise) / std

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `c_skip * x_t + c_out * output`."""
        c_skip = alpha * self.sigma_data**2 / self._variance(alpha, sigma)
        return c_skip * x_t + self.output_scale(alpha, sigma) * output

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return c_out."""
        return sigma * self.sigma_data / self._variance(alpha, sigma).sqrt()

    def _variance(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        return alpha**2 * self.sigma_data**2 + sigma**2


@dataclass(frozen=True)
class FDM:
    """Fast Diffusion Model (FDM): damps the network input of another parameterization.

    The network input becomes `s * x_t / alpha`. The training target and the estimate of x0 come
    from the other parameterization, `base`. With `level = sigma / alpha`, the factor s is

        s = exp(-m * B) * (1 + m * B),  B(u) = 0.1 * u + 9.95 * u**2,
        u = (level - sigma_min) / (sigma_max - sigma_min).

    At noise levels far above sigma_max, `s * x_t / alpha` is almost 0, so the network does not see
    the noise in x_t and cannot predict it. If the process has such levels, use `Velocity` or
    `EDMPreconditioning` as `base`, because their targets hardly depend on the noise at these
    levels. For example, a process with `CosineBetas(1000)` has noise levels up to 20,000.

    Args:
        base: the parameterization whose network input is damped.
        sigma_min: noise level `sigma / alpha` at which s = 1. The paper uses 0.002 for EDM, 0.001
            for VP (`ContinuousVP`, linear betas) and 0.02 for VE.
        sigma_max: noise level `sigma / alpha` at which u = 1. The paper uses 80 for EDM, 152.17 for
            VP and 100 for VE.
        multiplier: the factor m in the formula of s. The authors use 1 for VE. For EDM and VP, they
            use 2 on CIFAR-10 and AFHQ, and 1 on FFHQ.

    Raises:
        ValueError: if not 0 <= sigma_min < sigma_max, or if multiplier <= 0.

    Source: Wu et al. 2023 (Fast Diffusion Model, arXiv 2306.06991).

    Example:
        >>> fdm, one = FDM(EDMPreconditioning(), sigma_min=0.002, sigma_max=80.0), torch.ones(1)
        >>> [round(fdm.network_input(one, one, level * one).item(), 3) for level in (0.002, 20, 40)]
        [1.0, 0.629, 0.038]
    """

    base: Parameterization
    sigma_min: float
    sigma_max: float
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not (0 <= self.sigma_min < self.sigma_max and self.multiplier > 0):
            raise ValueError(f"0 <= sigma_min < sigma_max, multiplier > 0 must hold, got {self}.")

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `s * x_t / alpha`."""
        u = (sigma / alpha - self.sigma_min) / (self.sigma_max - self.sigma_min)
        damping = self.multiplier * (0.1 * u + 9.95 * u**2)
        return (-damping).exp() * (1 + damping) * x_t / alpha

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the target of the base."""
        return self.base.target(x0, noise, alpha, sigma)

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the estimate of the base."""
        return self.base.to_x0(output, x_t, alpha, sigma)

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return c_out of the base."""
        return self.base.output_scale(alpha, sigma)


@dataclass(frozen=True)
class ContrastCorrection:
    """Undoes the bias of `auxiliary_losses.ContrastiveFlow` when x0 is estimated.

    The network outputs the target of `base`, plus the bias. Before `base` estimates x0 from the
    output, this class removes the bias: it replaces the output with

        (1 - weight) * output + weight * base.target(mean, noise=0, alpha, sigma).

    The correction changes the estimate of x0, but not the training loss. You can therefore add the
    correction to a trained network, or remove it, before you sample. In training, however, a
    `DiffusionModule` raises an error for a positive weight without a `ContrastiveFlow` of this
    weight, and for a negative weight with a `ContrastiveFlow`.

    At the optimum, the corrected model equals a model that was trained without the contrastive
    term. The formula above holds if the target of `base` is linear in x0 and the noise. This is
    true for all classes in this file.

    Conversely, the weight `-w / (1 - w)` adds the bias of `ContrastiveFlow(w)` to a model that was
    trained without the contrastive term. Sampling with this weight is a control experiment, which
    shows how much of the effect of `ContrastiveFlow` is due to the bias.

    Args:
        base: the parameterization with which the network was trained.
        weight: weight w of the `ContrastiveFlow`, or `-w / (1 - w)` to add the bias instead of
            removing it.
        mean: mean of x0 over the training images: a number, or nested lists that broadcast against
            (C, H, W). With `Epsilon` as `base`, the mean has no effect.

    Raises:
        ValueError: if weight >= 1, or if it is 0 or not finite.

    Source: Stoica et al. 2025 (Contrastive Flow Matching, arXiv 2506.05350), whose authors apply
        this correction for sampling with guidance.

    Example:
        >>> alpha, sigma = torch.tensor([0.75]), torch.tensor([0.25])
        >>> target, mean_target = torch.tensor([2.0]), torch.tensor([-0.5])  # the mean of x0 is 0.5
        >>> output = (target - 0.05 * mean_target) / 0.95
        >>> correction = ContrastCorrection(FlowVelocity(), weight=0.05, mean=0.5)
        >>> x_t = torch.tensor([1.5])
        >>> correction.to_x0(output, x_t, alpha, sigma)
        tensor([1.])
        >>> FlowVelocity().to_x0(target, x_t, alpha, sigma)
        tensor([1.])
    """

    base: Parameterization
    weight: float
    mean: float | list[list[list[float]]] = 0.0

    def __post_init__(self) -> None:
        if not -math.inf < self.weight < 1 or self.weight == 0:
            raise ValueError(f"weight must be below 1 and not 0, got {self.weight}.")

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the network input of the base."""
        return self.base.network_input(x_t, alpha, sigma)

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the target of the base."""
        return self.base.target(x0, noise, alpha, sigma)

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return the estimate of the base from the corrected output."""
        mean = torch.zeros_like(x_t) + x_t.new_tensor(self.mean)
        mean_target = self.base.target(mean, torch.zeros_like(x_t), alpha, sigma)
        output = (1 - self.weight) * output + self.weight * mean_target
        return self.base.to_x0(output, x_t, alpha, sigma)

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return c_out of the base, so that the correction does not change the training loss."""
        return self.base.output_scale(alpha, sigma)
