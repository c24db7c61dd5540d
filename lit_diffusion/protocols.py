"""Structural types (protocols) of the parts of the library.

These protocols are not base classes. A class fits a protocol if it has the protocol's methods.
Therefore, a callback works with any LightningModule that has the methods it needs, without
inheritance from this library.

Symbols: `x_t = alpha * x0 + sigma * noise`. Images are (B, C, H, W), and times t are (B,) float64.
The number `u` in [0, 1] is a noise level, and 1 is the noisiest level.

jsonargparse checks objects from YAML against these protocols. For this reason, methods have names
(never `__call__`), parameters are positional-only, and attributes are read-only properties.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


def check_positive(**values: float | None) -> None:
    """Raise ValueError unless each value is None, or above 0 and finite.

    Args:
        values: values by name. The error message contains the name.

    Example:
        >>> check_positive(lr=0.1, weight_decay=None)
        >>> check_positive(lr=-1.0)
        Traceback (most recent call last):
        ValueError: lr must be above 0 and finite, got -1.0.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}.")


class Denoised(NamedTuple):
    """Estimates of x0 and noise from x_t, as solvers and guidance use them.

    Attributes:
        x0: (B, C, H, W) estimate of the clean image.
        noise: (B, C, H, W) estimate of the noise, with `x_t = alpha * x0 + sigma * noise`.
        logvar_frac: (B, C, H, W) learned log-variance, as a fraction between the log posterior
            variance (0) and log beta (1). None if the network does not learn the variance.
        shift: (B, C, H, W) gradient of a classifier. An ancestral step adds the step's variance
            times `shift` to its mean. None without a classifier.

    Example:
        >>> x_t = torch.full((1, 1, 2, 2), 0.5)
        >>> Denoised(x0=torch.zeros_like(x_t), noise=x_t).shift is None
        True
    """

    x0: Tensor
    noise: Tensor
    logvar_frac: Tensor | None = None
    shift: Tensor | None = None


class Prediction(NamedTuple):
    """Inputs and outputs of one forward pass in training, from which a loss is computed.

    Attributes:
        output: (B, C, H, W) output of the network, without its learned variance.
        variance_output: (B, C, H, W) the second C channels of the output if the variance is
            learned, else None.
        x0: (B, C, H, W) clean images, in [-1, 1] for pixels.
        x_t: (B, C, H, W) noised images.
        t: (B,) float64 times of the process.
        alpha: (B,) float64 signal scales at t.
        sigma: (B,) float64 noise scales at t.
    """

    output: Tensor
    variance_output: Tensor | None
    x0: Tensor
    x_t: Tensor
    t: Tensor
    alpha: Tensor
    sigma: Tensor


class NonFiniteSamples(ArithmeticError):
    """Raised by `CanGenerate.generate` if samples contain NaN or infinity.

    Args:
        seeds: seeds of the samples that are not finite.
        step: optimizer steps completed; None if unknown.
        where: noise level at which the first of the samples became non-finite.

    Example:
        >>> NonFiniteSamples(seeds=[3, 8], step=1000, where="t = 5").seeds
        [3, 8]
    """

    def __init__(self, seeds: Sequence[int], step: int | None, where: str) -> None:
        self.seeds = list(seeds)
        listed = ", ".join(map(str, self.seeds[:8])) + (", ..." if len(self.seeds) > 8 else "")
        after = "" if step is None else f" after {step} optimizer steps"
        super().__init__(
            f"{len(self.seeds)} samples are not finite{after}, from {where} on (seeds {listed}); "
            "the weights may have diverged: lower the lr, clip gradients, or go back to an earlier "
            "checkpoint."
        )


Condition: TypeAlias = Tensor | tuple[Tensor, ...] | None
"""The condition of a batch, one row (B, ...) per image: labels, tokens, or (embeddings, mask).
None is unconditional."""


def by_part(function: Callable[..., Tensor], *conditions: Any) -> Condition:
    """Apply a function of tensors to conditions, or to each part of conditions that are tuples.

    Example:
        >>> by_part(lambda part: part[:1], (torch.zeros(4, 8), torch.ones(4)))
        (tensor([[0., 0., 0., 0., 0., 0., 0., 0.]]), tensor([1.]))
    """
    if conditions[0] is None:
        return None
    if isinstance(conditions[0], Tensor):
        return function(*conditions)
    return tuple(function(*parts) for parts in zip(*conditions, strict=True))


def describe_condition(condition: Condition) -> str:
    """Describe a condition by the dtype and shape of each tensor, for messages.

    Example:
        >>> describe_condition((torch.zeros(2, 3), torch.ones(2).bool()))
        '(torch.float32 (2, 3), torch.bool (2,))'
    """
    if isinstance(condition, tuple):
        return f"({', '.join(map(describe_condition, condition))})"
    kind = type(condition).__name__
    return f"{condition.dtype} {tuple(condition.shape)}" if isinstance(condition, Tensor) else kind


Device: TypeAlias = torch.device | str | None
"""None is torch's default."""
Denoise: TypeAlias = Callable[[Tensor, Tensor], Denoised]
"""(x_t (B, C, H, W), t (B,) float64) -> Denoised."""
DenoiseFor: TypeAlias = Callable[[Condition], Denoise]
"""The condition of B images -> Denoise."""
RandnLike: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor -> standard normal noise of its shape, dtype and device."""
Watch: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""(step index from 0, t (), x_t (B, C, H, W), x0 as the solver uses it), before every step."""


class Process(Protocol):
    """A forward process `x_t = alpha(t) * x0 + sigma(t) * noise`.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> process: Process = LinearFlow()
        >>> process.alpha_sigma(torch.tensor([0.25]).double())
        (tensor([0.7500], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    """

    @property
    def t_min(self) -> float:
        """Least noisy time in training."""

    @property
    def t_max(self) -> float:
        """Noisiest time."""

    @property
    def t_clean(self) -> float:
        """The time at which alpha = 1 and sigma = 0."""

    @property
    def num_steps(self) -> int | None:
        """Number of discrete steps; None for continuous time."""

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Signal and noise scales alpha and sigma, float64, with the shape of `t`."""

    def noise_label(self, t: Tensor, /) -> Tensor:
        """The input that tells the network the noise level, with the shape of `t`."""

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Time for a uniform number `u` in [0, 1], float64."""

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Time at which `log((alpha / sigma)**2)` has the given value, float64."""

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """x_t at the noisiest time, from standard normal noise."""


class Network(Protocol):
    """An nn.Module that predicts from noisy images.

    Modules annotate their network argument with nn.Module instead, because jsonargparse needs that.
    """

    def forward(self, x: Tensor, noise_label: Tensor, condition: Any, /) -> Tensor:
        """Compute the network's output.

        Args:
            x: (B, C, H, W) network input (`Parameterization.network_input`).
            noise_label: (B,) noise levels (`Process.noise_label`).
            condition: the `Condition` of the images.

        Returns:
            (B, C, H, W), or (B, 2C, H, W) if the variance is learned.
        """


class Conditioning(Protocol):
    """A kind of condition of images. Learned null embeddings are part of the network."""

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """Replace the rows in which `where` (B,) bool is True with the null condition."""

    def null(self, like: Condition, /) -> Condition:
        """The null condition in every row, with the shapes and on the device of `like`."""

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Default condition of samples with these seeds, on the CPU."""

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless this is a valid condition of `num` samples."""


class UniformDraws(Protocol):
    """Joint distribution of a batch of random numbers, each of which is uniform in [0, 1)."""

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""


class TimestepDistribution(Protocol):
    """Distribution of training times, defined by its quantile function."""

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """Map uniform numbers (B,) in [0, 1) to times (B,) float64."""


class Parameterization(Protocol):
    """Definition of the network's output. `alpha` and `sigma` broadcast against the images."""

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Network input computed from x_t, such as `c_in * x_t`."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Training target of the output."""

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Estimate of x0 from the output."""

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """`abs(d x0 / d output)`, with the shape of `alpha`."""


class Weighting(Protocol):
    """Factor on the squared error of the network's output."""

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Compute the factor on the squared error of each sample.

        Args:
            alpha: (B,) float64 signal scales.
            sigma: (B,) float64 noise scales.
            output_scale: (B,) float64, the `output_scale` of the parameterization.
            step: number of completed optimizer steps; None outside training.

        Returns:
            (B,) float64 factors.
        """


class Loss(Protocol):
    """Training objective: a weighted squared error, possibly with further terms."""

    @property
    def output_factor(self) -> int:
        """Output channels per image channel: 2 if the variance is learned, else 1."""

    @property
    def weighting(self) -> Weighting:
        """Factor on the squared error."""

    def per_sample(
        self,
        weighted_error: Tensor,
        prediction: Prediction,
        process: Process,
        parameterization: Parameterization,
        /,
    ) -> Tensor:
        """Compute the loss of each sample, (B,), from its weighted squared error, (B,)."""


class TimeGrid(Protocol):
    """Times at which a solver evaluates the network."""

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, from the noisiest time down to `process.t_clean`."""


class Variance(Protocol):
    """Variance of an ancestral step."""

    @property
    def learned(self) -> bool:
        """Whether the network must output the variance."""

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Log-variance between log_posterior and log_beta.

        `last` is True for the step to the clean image. `frac` is `Denoised.logvar_frac`.
        """


class Solver(Protocol):
    """Sampler: integrates the reverse process from noise to x0."""

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Integrate the reverse process.

        Args:
            denoise: the model, including guidance if there is any.
            process: the forward process.
            noise: (B, C, H, W) standard normal.
            randn_like: source of the noise of stochastic solvers.
            watch: function that is called once before each step. The first x_t is the prior sample,
                to which the solver may have added churn.

        Returns:
            x0 (B, C, H, W).
        """

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the solver cannot run on this process."""


class Guidance(Protocol):
    """A wrapper of a denoise function that steers samples towards their condition."""

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function; `null` has the null condition in every row."""


class Codec(Protocol):
    """A map from images to x0 and back.

    A stochastic codec, such as a VAE, also has `encode_for_training(images)`, which training steps
    call instead of `encode`. A codec with weights has an attribute `sha256`, the checksum of the
    weights. Checkpoints store the checksum. If a data module provides latents, its `vae_sha256`
    must equal the checksum.
    """

    @property
    def bounded(self) -> bool:
        """Whether all x0 lie in [-1, 1]. If so, solvers may clamp their estimates of x0."""

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Shape (C, H, W) of x0 for images of shape (C, H, W)."""

    def encode(self, images: Tensor, /) -> Tensor:
        """Encode images uint8 (B, C, H, W) to x0 float32."""

    def decode(self, x0: Tensor, /) -> Tensor:
        """Decode x0 to images uint8 (B, C, H, W)."""


# Callbacks and analyses use a LightningModule only through the protocols below.


@runtime_checkable
class HasTimesteps(Protocol):
    """A module whose distribution over noise levels a callback may change.

    A callback requires only the attributes that it sets.

    Attributes:
        timestep_density: (num_bins,) density over u in [0, 1], not necessarily normalized. None
            means the uniform density.
        timestep_weight: (num_bins,) factors on the loss over u in [0, 1]. None means 1.

    Example:
        >>> class Module(torch.nn.Module):
        ...     timestep_density = timestep_weight = None
        >>> isinstance(Module(), HasTimesteps)
        True
    """

    timestep_density: Tensor | None
    timestep_weight: Tensor | None


@runtime_checkable
class CanGenerate(Protocol):
    """A module that generates an image from each seed.

    Example:
        >>> class Noise(torch.nn.Module):
        ...     def generate(self, seeds, labels=None):
        ...         return torch.randint(256, (len(seeds), 3, 8, 8), dtype=torch.uint8)
        >>> isinstance(Noise(), CanGenerate)
        True
    """

    def generate(self, seeds: Sequence[int], labels: Condition = None) -> Tensor:
        """Images uint8 (N, C, H, W). Image i depends only on seeds[i] and labels[i]."""


@runtime_checkable
class DescribesSampling(Protocol):
    """A module that reports its sampling settings, which are stored with every score."""

    def sampling_record(self) -> dict[str, Any]:
        """Solver, steps, guidance and other settings, as plain builtins."""


class HasNoiseLevels(Protocol):
    """A module that computes the loss of images at given noise levels.

    `isinstance` does not support this protocol, because from Python 3.12 on it would return False
    for a codec that is an nn.Module.
    """

    @property
    def process(self) -> Process:
        """Forward process. Its `from_unit` maps a uniform u to a time."""

    @property
    def codec(self) -> Codec:
        """Codec. Its `encode` maps images of the data set to x0."""

    @property
    def num_classes(self) -> int | None:
        """Number of labels; None if the loss takes no labels."""

    def per_sample_loss(
        self, x0: Tensor, labels: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """Compute losses (B,) that depend only on the arguments and the weights."""


@runtime_checkable
class WeightsProvider(Protocol):
    """A callback that provides alternative weights for a module, such as EMA.

    Example:
        >>> from lit_diffusion.callbacks import EMA
        >>> isinstance(EMA(), WeightsProvider)
        True
    """

    def names(self) -> list[str]:
        """Names that `weights` accepts."""

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Context in which the module's parameters hold the named weights."""
