"""Structural types (protocols) of the parts of the library.

None of these is a base class. A class fits a protocol by having its methods, so any LightningModule
can use a callback without inheriting from this library. Symbols: x_t = alpha * x0 + sigma * noise;
images (B, C, H, W); times t (B,) float64; `u` in [0, 1] is a noise level, 1 the noisiest.

jsonargparse checks objects from YAML against these protocols. This is why methods have names (never
`__call__`), parameters are positional-only and attributes are read-only properties.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


def check_positive(**values: float | None) -> None:
    """Raise ValueError unless each value, passed by its name, is above 0 and finite, or None."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}.")


class Denoised(NamedTuple):
    """Estimates of x0 and noise from x_t, as solvers and guidance use them.

    Attributes:
        x0: (B, C, H, W) estimate of the clean image.
        noise: (B, C, H, W) estimate of the noise; x_t = alpha * x0 + sigma * noise holds.
        logvar_frac: (B, C, H, W) learned log-variance, as a fraction between the log posterior
            variance (0) and log beta (1); None if the network does not learn it.
        shift: (B, C, H, W) classifier gradient; an ancestral step adds its variance times `shift`
            to its mean. None without a classifier.
    """

    x0: Tensor
    noise: Tensor
    logvar_frac: Tensor | None = None
    shift: Tensor | None = None


class Prediction(NamedTuple):
    """Inputs and outputs of one forward pass in training, from which a loss is computed.

    Attributes:
        output: (B, C, H, W) output of the network, without its learned variance.
        variance_output: (B, C, H, W) the second C channels if the variance is learned, else None.
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
        where: noise level at which the first of them became non-finite.
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
    """Apply a function of tensors to conditions, or to each part of conditions that are tuples."""
    if conditions[0] is None:
        return None
    if isinstance(conditions[0], Tensor):
        return function(*conditions)
    return tuple(function(*parts) for parts in zip(*conditions, strict=True))


def describe_condition(condition: Condition) -> str:
    """Dtype and shape of each tensor, for messages.

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
    """A forward process x_t = alpha(t) x0 + sigma(t) noise."""

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
        """Signal and noise scales, float64, of the shape of `t`."""

    def noise_label(self, t: Tensor, /) -> Tensor:
        """The network's input for the noise level, of the shape of `t`."""

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Time of the uniform `u` in [0, 1], float64."""

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Time at which log (alpha / sigma)^2 has the given value, float64."""

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """x_t at the noisiest time, from standard normal noise."""


class Network(Protocol):
    """An nn.Module that predicts from noisy images. jsonargparse needs the annotation nn.Module."""

    def forward(self, x: Tensor, noise_label: Tensor, condition: Any, /) -> Tensor:
        """(B, C, H, W), (B,) and the `Condition` -> (B, C, H, W), 2C with a learned variance."""


class Conditioning(Protocol):
    """A kind of condition. Learned null embeddings are part of the network, not of this."""

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """The condition with the null condition in the rows where `where` (B,) bool is True."""

    def null(self, like: Condition, /) -> Condition:
        """The null condition in every row, with the shapes and on the device of `like`."""

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Default condition of the samples with these seeds, on the CPU."""

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless this is a valid condition of `num` samples."""


class UniformDraws(Protocol):
    """Joint distribution of a batch of uniforms u, each of which is marginally uniform."""

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""


class TimestepDistribution(Protocol):
    """Distribution of training times, defined by its quantile function."""

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """(B,) uniforms in [0, 1) -> (B,) float64 times."""


class Parameterization(Protocol):
    """What the network outputs. `alpha` and `sigma` broadcast against the images."""

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Network input computed from x_t, such as c_in x_t."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Training target of the output."""

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Estimate of x0 from the output."""

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """|d x0 / d output|, of the shape of `alpha`."""


class Weighting(Protocol):
    """Factor on the squared error of the network's output."""

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """(B,) float64 scales -> (B,) float64 factors.

        `output_scale` is the parameterization's. `step` is the number of completed optimizer steps,
        None outside training.
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
        """(B,) weighted squared errors -> (B,) losses, which are minimised."""


class TimeGrid(Protocol):
    """Times at which a solver evaluates the network."""

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, from the noisiest time down; the last is `process.t_clean`."""


class Variance(Protocol):
    """Variance of an ancestral step."""

    @property
    def learned(self) -> bool:
        """Whether the network must output it."""

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Log-variance between log_posterior and log_beta.

        `last` marks the step to the clean image; `frac` is `Denoised.logvar_frac`.
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
        """Standard normal noise (B, C, H, W) -> x0.

        `watch` is called once before each step. Its first x_t is the prior sample, plus churn if
        the solver adds any.
        """

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the solver can't run on this process."""


class Guidance(Protocol):
    """Wraps denoising to steer samples towards their condition."""

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """A guided Denoise for these labels; `null` is the null condition in every row."""


class Codec(Protocol):
    """Maps images to x0 and back.

    A stochastic codec, such as a VAE, also has `encode_for_training(images)`, which training steps
    call instead of `encode`. A codec with weights has their checksum in `sha256`. Checkpoints
    record it, and a data module of latents must have the same value in `vae_sha256`.
    """

    @property
    def bounded(self) -> bool:
        """Whether all x0 lie in [-1, 1], so that solvers may clamp their estimates of it."""

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Shape (C, H, W) of x0 for images of shape (C, H, W)."""

    def encode(self, images: Tensor, /) -> Tensor:
        """Images uint8 (B, C, H, W) -> x0 float32."""

    def decode(self, x0: Tensor, /) -> Tensor:
        """x0 -> images uint8 (B, C, H, W)."""


# Callbacks and analyses use a LightningModule only through the protocols below.


@runtime_checkable
class HasTimesteps(Protocol):
    """A module whose distribution over noise levels a callback may change.

    Both attributes are unnormalised (num_bins,) values over u in [0, 1]. None is a uniform density
    and a weight of 1. A callback requires only the attributes that it sets.
    """

    timestep_density: Tensor | None
    timestep_weight: Tensor | None


@runtime_checkable
class CanGenerate(Protocol):
    """A module that turns seeds into images."""

    def generate(self, seeds: Sequence[int], labels: Condition = None) -> Tensor:
        """Images uint8 (N, C, H, W); image i depends only on seeds[i] and labels[i]."""


@runtime_checkable
class DescribesSampling(Protocol):
    """A module that reports its sampling settings, which are stored with every score."""

    def sampling_record(self) -> dict[str, Any]:
        """Solver, steps, guidance, ... as plain builtins."""


class HasNoiseLevels(Protocol):
    """A module that computes the loss of images at given noise levels.

    Not runtime-checkable: since Python 3.12, isinstance does not find a codec that is an nn.Module.
    """

    @property
    def process(self) -> Process:
        """Forward process; its `from_unit` maps a uniform u to a time."""

    @property
    def codec(self) -> Codec:
        """Codec; its `encode` maps images of the data set to x0."""

    @property
    def num_classes(self) -> int | None:
        """Number of labels; None if the loss takes no labels."""

    def per_sample_loss(
        self, x0: Tensor, labels: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """(B,) losses, which depend only on the arguments and the weights."""


@runtime_checkable
class WeightsProvider(Protocol):
    """Provides alternative weights for a module, as the EMA callback does."""

    def names(self) -> list[str]:
        """Names that `weights` accepts."""

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Context in which the module's parameters hold the named weights."""
