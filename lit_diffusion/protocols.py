"""The seams of the library: what each part offers the others, as structural types.

Nothing here is a base class. A class fits a protocol by having its methods, so a foreign
LightningModule can use a callback without inheriting from us. Symbols: x_t = alpha * x0 + sigma *
noise; images (B, C, H, W); times t (B,) float64; a uniform `u` in [0, 1] stands for a noise level,
1 for the noisiest.

jsonargparse loads strategies from YAML against these protocols, which is why their methods are
named (never `__call__`), their parameters positional-only and their attributes read-only
properties.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


class Denoised(NamedTuple):
    """What a network says about x_t, in the terms that solvers and guidance work with.

    Attributes:
        x0: (B, C, H, W) estimate of the clean image.
        noise: (B, C, H, W) estimate of the noise; x_t = alpha * x0 + sigma * noise holds.
        logvar_frac: (B, C, H, W) learned variance, as a fraction of the way from log posterior
            variance (0) to log beta (1); None where the network does not learn it.
        shift: (B, C, H, W) gradient that an ancestral step adds, times its variance, to its mean;
            None without a classifier.
    """

    x0: Tensor
    noise: Tensor
    logvar_frac: Tensor | None = None
    shift: Tensor | None = None


class Prediction(NamedTuple):
    """One forward pass of the network in training, as a loss sees it.

    Attributes:
        output: (B, C, H, W) output of the network, without its learned variance.
        variance_output: (B, C, H, W) the other C channels where the variance is learned, else None.
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
    """Raised by `CanGenerate.generate` instead of returning NaN as if it were an image.

    Args:
        seeds: of the samples that are not finite.
        step: optimizer steps completed; None where they are not known.
        where: noise level at which the first of them went wrong.
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
"""What images are conditioned on, a row (B, ...) per image: labels, tokens, (embeddings, mask).
None where they are conditioned on nothing."""


def by_part(function: Callable[..., Tensor], *conditions: Any) -> Condition:
    """A function of tensors, of conditions: of each part in turn where they are tuples."""
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
"""(step from 0 on, t (), x_t (B, C, H, W), x0 as the solver uses it): called before every step."""


class Process(Protocol):
    """A forward process x_t = alpha(t) x0 + sigma(t) noise."""

    @property
    def t_min(self) -> float:
        """Least noisy time that is trained on."""

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
        """The noise level as the network gets it, of the shape of `t`."""

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Time of the uniform `u` in [0, 1], float64."""

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Time at which log (alpha / sigma)^2 has the given value, float64."""

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """x_t at the noisiest time, from standard normal noise."""


class Network(Protocol):
    """An nn.Module that looks at noisy images; jsonargparse wants it called nn.Module."""

    def forward(self, x: Tensor, noise_label: Tensor, condition: Any, /) -> Tensor:
        """(B, C, H, W), (B,) and the `Condition` -> (B, C, H, W), 2C with a learned variance."""


class Conditioning(Protocol):
    """What images are conditioned on. It gives rows alone: a learned "none" is the network's."""

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """The condition with "none" in the rows where `where` (B,) bool is true."""

    def null(self, like: Condition, /) -> Condition:
        """None for every row of `like`, of its shapes and on its device."""

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """What samples of these seeds are generated from where nobody says; on the CPU."""

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError where a user's condition is none of `num` samples."""


class UniformDraws(Protocol):
    """Joint distribution of a batch's uniforms u; each of them alone is uniform."""

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""


class TimestepDistribution(Protocol):
    """Distribution of training times, as a map from uniform to time."""

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """(B,) uniforms in [0, 1) -> (B,) float64 times."""


class Parameterization(Protocol):
    """What the network outputs. `alpha` and `sigma` broadcast against the images."""

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """x_t as the network wants to see it."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """The output that a perfect network would give."""

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Clean image that the output stands for."""

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """|d x0 / d output|, of the shape of `alpha`."""


class Weighting(Protocol):
    """Factor on the squared error of the network's output."""

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """(B,) float64 scales -> (B,) float64 factors.

        `output_scale` is the parameterization's; `step` counts optimizer steps completed, None
        where there is no training.
        """


class Loss(Protocol):
    """Training objective: a weighted squared error, and what is added to it."""

    @property
    def output_factor(self) -> int:
        """Output channels per image channel: 2 where the variance is learned, else 1."""

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
    """Reverse-time generator."""

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

        `watch` is called once a step, before it is taken; x_t of the first is the prior, with
        churn if the solver adds any.
        """

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the solver can't run on this process."""


class Guidance(Protocol):
    """Wraps denoising to steer samples towards their condition."""

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """A Denoise for these labels; `null` is what stands for none of them, row by row."""


class Codec(Protocol):
    """Maps images to the space that is diffused, and back.

    A codec that encodes at random, as a VAE does, also has `encode_for_training(images)`, which
    training steps call in place of `encode`. A codec with weights has their `sha256`, which
    checkpoints record and which must equal `vae_sha256` of data that hold latents.
    """

    @property
    def bounded(self) -> bool:
        """Whether all x0 lie in [-1, 1], so that solvers may clamp their estimates of it."""

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """(C, H, W) of an x0, of images (C, H, W)."""

    def encode(self, images: Tensor, /) -> Tensor:
        """Images uint8 (B, C, H, W) -> x0 float32."""

    def decode(self, x0: Tensor, /) -> Tensor:
        """x0 -> images uint8 (B, C, H, W)."""


# All that callbacks and analyses know of a LightningModule.


@runtime_checkable
class HasTimesteps(Protocol):
    """A module whose distribution over noise levels a callback may change.

    Both are (num_bins,) over u in [0, 1], unnormalised; None means uniform and 1. A callback asks
    for those of the two that it sets.
    """

    timestep_density: Tensor | None
    timestep_weight: Tensor | None


@runtime_checkable
class CanGenerate(Protocol):
    """A module that turns seeds into images."""

    def generate(self, seeds: Sequence[int], labels: Condition = None) -> Tensor:
        """Images uint8 (N, C, H, W); image i depends on seeds[i] and labels[i] alone."""


@runtime_checkable
class DescribesSampling(Protocol):
    """A module that can say how it generates, for the record beside every score."""

    def sampling_record(self) -> dict[str, Any]:
        """Solver, steps, guidance, ... as plain builtins."""


class HasNoiseLevels(Protocol):
    """A module that computes its loss at a given noise level of given images.

    Not runtime-checkable: from Python 3.12, isinstance does not see a codec that is an nn.Module.
    """

    @property
    def process(self) -> Process:
        """Its `from_unit` gives the time of a uniform u."""

    @property
    def codec(self) -> Codec:
        """Its `encode` makes x0 of the data set's images."""

    @property
    def num_classes(self) -> int | None:
        """Number of labels; None where the loss takes no labels."""

    def per_sample_loss(
        self, x0: Tensor, labels: Condition, t: Tensor, noise: Tensor, step: int | None = None
    ) -> Tensor:
        """(B,) losses, a function of the arguments and the weights alone."""


@runtime_checkable
class WeightsProvider(Protocol):
    """Something, such as the EMA callback, that can put other weights in place."""

    def names(self) -> list[str]:
        """Names that `weights` accepts."""

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Context in which the module's parameters hold the named weights."""
