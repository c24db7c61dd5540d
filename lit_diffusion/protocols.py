"""Structural types (protocols) of the parts of the library.

A class fits a protocol if it has the methods of the protocol. It does not have to inherit from the
protocol. Therefore, a callback works with any LightningModule that has the methods that the
callback calls.

Symbols: `x_t = alpha * x0 + sigma * noise`. Images are (B, C, H, W), and times t are (B,) float64.
The number u in [0, 1] is a noise level, with the noisiest level at u = 1. `Process.from_unit` maps
u to a time.

jsonargparse checks objects from YAML against these protocols. For this check, methods must have
names (not `__call__`), parameters must be positional-only, and attributes must be read-only
properties.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn


def check_positive(**values: float | None) -> None:
    """Raise ValueError unless each named value is None, or above 0 and finite."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}.")


class Denoised(NamedTuple):
    """Estimates of x0 and noise from x_t, for solvers and guidance.

    Attributes:
        x0: (B, C, H, W) estimate of the clean image.
        noise: (B, C, H, W) estimate of the noise, with `x_t = alpha * x0 + sigma * noise`.
        logvar_frac: (B, C, H, W) learned log-variance of the reverse step from t to s, on a linear
            scale. On this scale, 0 is the logarithm of the posterior variance, and 1 is the
            logarithm of beta, which is the variance of `q(x_t | x_s)`. None if the network does not
            learn the variance.
        shift: (B, C, H, W) gradient of a classifier. `DDPM` adds `variance * shift` to the mean of
            each reverse step. None without `ClassifierShift`.

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
        output: (B, C, H, W) the first C channels of the network's output.
        variance_output: (B, C, H, W) the last C channels of the network's output; None if the
            network does not learn the variance.
        x0: (B, C, H, W) clean images: pixels in [-1, 1], or latents.
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
        step: number of completed optimizer steps; None if unknown.
        where: time or sampling step at which a value first became NaN or infinite, such as "t = 5".
    """

    def __init__(self, seeds: Sequence[int], step: int | None, where: str) -> None:
        self.seeds = list(seeds)
        self._arguments = self.seeds, step, where
        listed = ", ".join(map(str, self.seeds[:8])) + (", ..." if len(self.seeds) > 8 else "")
        after = "" if step is None else f" after {step} optimizer steps"
        super().__init__(
            f"{len(self.seeds)} samples are not finite{after}, from {where} on (seeds {listed}); "
            "the weights may have diverged: lower the lr, clip gradients, or go back to an earlier "
            "checkpoint."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what `pickle` needs to send the error to another process."""
        return type(self), self._arguments


Condition: TypeAlias = Tensor | tuple[Tensor, ...] | None
"""The condition of a batch, with one row per image: labels, word ids, or (embeddings, mask).
None means no condition."""


def by_part(function: Callable[..., Tensor], *conditions: Any) -> Condition:
    """Apply a function to conditions, or to each part of conditions that are tuples.

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
    """Describe the dtype and shape of each tensor of a condition, for error messages.

    Example:
        >>> describe_condition((torch.zeros(2, 3), torch.ones(2).bool()))
        '(torch.float32 (2, 3), torch.bool (2,))'
    """
    if isinstance(condition, tuple):
        return f"({', '.join(map(describe_condition, condition))})"
    if isinstance(condition, Tensor):
        return f"{condition.dtype} {tuple(condition.shape)}"
    return type(condition).__name__


Device: TypeAlias = torch.device | str | None
"""None means torch's default device."""
Denoise: TypeAlias = Callable[[Tensor, Tensor], Denoised]
"""(x_t (B, C, H, W), t (B,) float64) -> Denoised."""
DenoiseFor: TypeAlias = Callable[[Condition], Denoise]
"""The condition of B images -> Denoise."""
RandnLike: TypeAlias = Callable[[Tensor], Tensor]
"""A tensor -> standard normal noise of its shape, dtype and device."""
Watch: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called before every step with (index of the step from 0, t (), x_t (B, C, H, W), x0). The x0 is
the estimate that the solver uses."""


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
        """The least noisy time in training."""

    @property
    def t_max(self) -> float:
        """The noisiest time."""

    @property
    def t_clean(self) -> float:
        """The time at which alpha = 1 and sigma = 0."""

    @property
    def num_steps(self) -> int | None:
        """Number of discrete steps; None for continuous time."""

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return the signal and noise scales, alpha and sigma, in float64 with the shape of t."""

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the network's input that encodes the noise level, with the shape of t."""

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Map u in [0, 1] to a time float64, which is noisier for larger u."""

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Return the time float64 at which `log((alpha / sigma)**2)` has the given value."""

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Scale standard normal noise to an x_t at the time t at which sampling starts."""


class Network(Protocol):
    """An nn.Module that maps noisy images to the output that a `Parameterization` defines."""

    def forward(self, x: Tensor, noise_label: Tensor, condition: Any, /) -> Tensor:
        """Compute the network's output.

        Args:
            x: (B, C, H, W) result of `Parameterization.network_input`.
            noise_label: (B,) result of `Process.noise_label`, which encodes the noise levels.
            condition: the `Condition` of the images.

        Returns:
            Output (B, C, H, W), or (B, 2C, H, W) if the network learns the variance.
        """


class Conditioning(Protocol):
    """A kind of condition, such as class labels, with a null condition for "no condition"."""

    def drop(self, condition: Condition, where: Tensor, /) -> Condition:
        """Replace the rows in which `where` (B,) bool is True with the null condition."""

    def null(self, like: Condition, /) -> Condition:
        """Return the null condition for every row, with the same shapes and device as `like`."""

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Return the default condition of samples with these seeds, on the CPU."""

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError unless `condition` is a valid condition of `num` samples."""


class UniformDraws(Protocol):
    """Joint distribution of n random numbers. Each number alone is uniform in [0, 1)."""

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """Draw the numbers, (n,) float64."""


class TimestepDistribution(Protocol):
    """Distribution of training times, which is defined by its quantile function."""

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """Map numbers in [0, 1) to times in float64, with the same shape (B,)."""


class Parameterization(Protocol):
    """Definition of what the network outputs, such as noise or velocity.

    The arguments `alpha` and `sigma` broadcast against the images.
    """

    def network_input(self, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Compute the network's input from x_t, such as `c_in * x_t`."""

    def target(self, x0: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Compute the training target of the network's output."""

    def to_x0(self, output: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Estimate x0 from the network's output and x_t."""

    def output_scale(self, alpha: Tensor, sigma: Tensor, /) -> Tensor:
        """Return `abs(d x0 / d output)`, with the shape of `alpha`."""


class Weighting(Protocol):
    """Factor on the squared error of the network's output, for each noise level."""

    def weight(
        self, alpha: Tensor, sigma: Tensor, output_scale: Tensor, step: int | None, /
    ) -> Tensor:
        """Compute the factor on the squared error of each sample.

        Args:
            alpha: (B,) float64 signal scales.
            sigma: (B,) float64 noise scales.
            output_scale: (B,) float64 scales from `Parameterization.output_scale`.
            step: number of completed optimizer steps; None outside training.

        Returns:
            The factors, (B,) float64.
        """


class Loss(Protocol):
    """Training objective: a weighted squared error, possibly with more terms."""

    @property
    def output_factor(self) -> int:
        """Output channels per image channel: 2 if the network learns the variance, else 1."""

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
        """Compute the loss (B,) of each sample from its weighted squared error (B,)."""


class NoisedBatch(NamedTuple):
    """The images of a training step and the noise that is added to them.

    Attributes:
        x0: (B, C, H, W) clean images, in [-1, 1] for pixels.
        condition: condition of the images, after label dropout.
        t: (B,) float64 times of the process.
        noise: (B, C, H, W) noise, with `x_t = alpha(t) * x0 + sigma(t) * noise`.
        u: (B,) float64 numbers in [0, 1). Each time t is the u-quantile of the module's `times`.
        images: the images as the data module returns them: uint8 (B, 3, H', W') pixels, or
            floating-point moments of latents.
    """

    x0: Tensor
    condition: Condition
    t: Tensor
    noise: Tensor
    u: Tensor
    images: Tensor


class AuxiliaryLoss(Protocol):
    """A further term of the training loss, for example on the features of a block.

    The term is added to the loss in training steps only. If the auxiliary loss is an nn.Module, its
    parameters are trained and saved with the network.
    """

    def attach(self, network: nn.Module, /) -> None:
        """Register forward hooks on the network. `DiffusionModule` calls this method once.

        Raises:
            ValueError: if the network lacks the blocks that the loss needs.
        """

    def compute(self, module: Any, batch: NoisedBatch, /) -> Tensor:
        """Compute the loss term, a scalar, right after the network has processed the batch.

        Args:
            module: the `DiffusionModule` that is trained.
            batch: the images of the step, and the noise that was added to them.
        """


class Teacher(Protocol):
    """Source of the features with which `RepresentationAlignment` aligns a block of the network.

    If the teacher is an nn.Module, its state is saved with the network.
    """

    @property
    def width(self) -> int | None:
        """Number of features per position. None means as many features as the aligned block has."""

    def attach(self, network: nn.Module, /) -> None:
        """Prepare the teacher for this network. `RepresentationAlignment` calls this method once.

        Raises:
            ValueError: if the teacher does not fit the network.
        """

    def features(self, module: Any, batch: NoisedBatch, /) -> Tensor:
        """Compute the features (B, h, w, D) of a batch, without gradient.

        Args:
            module: the `DiffusionModule` that is trained.
            batch: the images of the step, and the noise that was added to them.
        """


class Coupling(Protocol):
    """A rule that decides which noise of a batch is added to which image of the batch."""

    def couple(self, x0: Tensor, noise: Tensor, condition: Condition, /) -> Tensor:
        """Assign noise to images.

        Args:
            x0: (B, C, H, W) clean images.
            noise: (B, C, H, W) independent standard normal noise.
            condition: condition of the images, before label dropout.

        Returns:
            (B, C, H, W) noise for the images of x0, often a permutation of the argument `noise`.
        """


class TimeGrid(Protocol):
    """Times between which a solver takes its steps."""

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to `process.t_clean`."""


class Variance(Protocol):
    """Variance of the noise that an ancestral solver adds in each step."""

    @property
    def learned(self) -> bool:
        """Whether the network must output the variance."""

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Return the log-variance of a step, between `log_posterior` and `log_beta`.

        Args:
            log_beta: logarithm of the variance of `q(x_t | x_s)` for the step from t to s.
            log_posterior: logarithm of the variance of `q(x_s | x_t, x0)`.
            last: whether the step ends at the clean image.
            frac: `Denoised.logvar_frac`; None if the network does not learn the variance.
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
            denoise: denoise function of the model, with guidance if it is used.
            process: the forward process.
            noise: (B, C, H, W) standard normal noise, from which sampling starts.
            randn_like: source of the noise that stochastic solvers add in the steps.
            watch: function that is called once before each step, with the arguments of `Watch`. In
                the first call, x_t is the scaled `noise`, plus the churn (noise) that the solver
                may add before its first step.

        Returns:
            The sampled x0 (B, C, H, W).
        """

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the solver cannot run on this process."""


class Guidance(Protocol):
    """A wrapper of a denoise function that makes samples follow their condition more closely."""

    def guide(
        self, denoise_for: DenoiseFor, labels: Condition, process: Process, null: Condition, /
    ) -> Denoise:
        """Return a guided denoise function. `null` is the null condition, in every row."""


class Codec(Protocol):
    """A map from images to x0 and back.

    A codec may have a method `encode_for_training(images)`, which training steps call instead of
    `encode`. For a VAE, this method draws a random latent. A codec with weights has an attribute
    `sha256`, the checksum of its weights. Checkpoints store this checksum. If a data module
    provides latents, its attribute `vae_sha256` must equal the `sha256` of the codec.
    """

    @property
    def bounded(self) -> bool:
        """Whether all x0 are in [-1, 1]. If so, solvers may clamp their estimates of x0."""

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Shape (C, H, W) of x0 for images of shape (C, H, W)."""

    def encode(self, images: Tensor, /) -> Tensor:
        """Encode images uint8 (B, C, H, W) to x0 float32."""

    def decode(self, x0: Tensor, /) -> Tensor:
        """Decode x0 to images uint8 (B, C, H, W)."""


# Callbacks and analyses access a LightningModule only through the protocols below.


@runtime_checkable
class NormalizesWeights(Protocol):
    """A network whose weights must be normalized after every optimizer step.

    `DiffusionModule` calls `normalize_weights` in a hook of the optimizer, after each step.

    Example:
        >>> from lit_diffusion.networks.magnitude_preserving import MagnitudePreservingUNet
        >>> isinstance(MagnitudePreservingUNet(1, 1, 0.005, model_channels=64), NormalizesWeights)
        True
    """

    def normalize_weights(self) -> None:
        """Scale the weights in place, without a change of the network's output."""


@runtime_checkable
class HasTimesteps(Protocol):
    """A module whose distribution of training noise levels u can be changed by callbacks.

    A callback needs only the attribute that it sets.

    Attributes:
        timestep_density: (num_bins,) density of the noise level u in equal bins over [0, 1], not
            necessarily normalized. None means the uniform density.
        timestep_weight: (num_bins,) factor on the loss for each bin of the noise level. None means
            a factor of 1.

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
        """Generate one uint8 image per seed. Image i depends only on `seeds[i]` and `labels[i]`.

        The images have the shape (N, C, H, W).
        """


@runtime_checkable
class DescribesSampling(Protocol):
    """A module that reports its sampling settings, so that they can be stored with every score."""

    def sampling_record(self) -> dict[str, Any]:
        """Return solver, steps, guidance and other settings, as values that JSON supports."""


# Not runtime_checkable: from Python 3.12 on, `isinstance` would return False for a module whose
# codec is an nn.Module.
class HasNoiseLevels(Protocol):
    """A module that computes the loss of images at given noise levels.

    This protocol does not support `isinstance`.
    """

    @property
    def process(self) -> Process:
        """Forward process. Its `from_unit` maps u to a time."""

    @property
    def codec(self) -> Codec:
        """Codec. Its `encode` maps images of the data set to x0."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if the loss takes no class labels."""

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
        """Return the names that `weights` accepts."""

    def weights(self, name: str) -> AbstractContextManager[None]:
        """Context in which the module's parameters have the values of the weights `name`."""
