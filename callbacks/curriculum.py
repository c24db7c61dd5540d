"""Curriculum timestep schedule (CLTS): a density of noise levels that changes during training.

A noise level is a number u in [0, 1], where u = 0 is the cleanest level and u = 1 the noisiest. A
density is a vector of num_bins probabilities, one for each of num_bins bins of equal width. The
probability of bin i is computed at the right edge of the bin, `u = (i + 1) / num_bins`. With
num_bins = T, this edge is the paper's `t / T` for t = 1, ..., T.

The class `TimestepWriter` is the base class of all callbacks that control at which noise levels a
module trains.

Source: "Why diffusion models are stable and how to make them faster" (2023), section 4.2. The
control callbacks `CurriculumWeight` and `ImportanceWeightedCurriculum` are not in the paper.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, pi, sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .trainer_state import should_log

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

Normalize = Literal["truncate", "mix"]


# The density


def clts_gamma(step: int, num_steps: int) -> float:
    """Return the progress of the curriculum, `min(step / num_steps, 1)`.

    Args:
        step: optimizer steps completed.
        num_steps: optimizer steps after which the progress of the curriculum is 1.

    Source: Eq. 8 of "Why diffusion models are stable and how to make them faster" (2023). The
    progress is clipped at 1, because a larger progress would make the density negative.

    Example:
        >>> clts_gamma(0, 50_000), clts_gamma(25_000, 50_000), clts_gamma(500_000, 50_000)
        (0.0, 0.5, 1.0)
    """
    if not 1 <= num_steps < inf:
        raise ValueError(
            f"num_steps must be at least 1 optimizer step, got {num_steps}: pass the number of "
            "steps in which the density changes, such as a tenth of the run."
        )
    return min(step / num_steps, 1.0)


def gaussian_log_density(
    mean: float, std: float, num_bins: int, device: torch.device | str | None = None
) -> Tensor:
    """Return the log density of `N(mean, std**2)` for each bin, without the normalizing constant.

    Returns:
        (num_bins,) float64: the values of `-(u - mean)**2 / (2 * std**2)` at the right edges of the
        bins, `u = 1 / num_bins, ..., 1`.

    Example:
        >>> gaussian_log_density(mean=0.5, std=0.5, num_bins=4).tolist()
        [-0.125, -0.0, -0.125, -0.5]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}.")
    if not 0 <= mean <= 1:
        raise ValueError(f"a mean is a noise level u in [0, 1], got {mean}; divide t by T.")
    if not 1 <= std * num_bins < inf:
        raise ValueError(
            f"std must be at least the width of a bin, 1 / {num_bins}, and finite, got {std}."
        )
    u = torch.arange(1, num_bins + 1, dtype=torch.float64, device=device) / num_bins
    return -((u - mean) ** 2) / (2 * std**2)


def clts_density(
    step: int,
    num_steps: int,
    mean: float = 0.3,
    std: float = 1.0,
    num_bins: int = 1000,
    normalize: Normalize = "truncate",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the density of the curriculum. It changes from uniform to Gaussian as `step` grows.

    The density is the mixture `p = (1 - gamma) * uniform + gamma * N(mean, std**2)` with
    `gamma = clts_gamma(step, num_steps)`. It is uniform at step 0. From step `num_steps` on, it is
    the Gaussian.

    The argument `normalize` selects how to mix the two densities. "truncate" first normalizes the
    Gaussian over the bins, so that gamma is the fraction of samples from the Gaussian. "mix" adds
    the two densities without this normalization, as in Eq. 8, and normalizes the sum. With "mix",
    the fraction of samples from the Gaussian is below gamma, because a part of the Gaussian is
    outside [0, 1]. With the default mean and std, only 38% of the Gaussian is inside.

    Args:
        step: optimizer steps completed.
        num_steps: optimizer steps until the density is the Gaussian.
        mean: mean of the Gaussian: the noise level u in [0, 1] that is sampled most.
        std: standard deviation of the Gaussian in units of u. The paper uses 1.0 (sigma = T).
        num_bins: number of equal bins over [0, 1]. With num_bins = T, the result is the paper's
            density over the times t = 1, ..., T.
        normalize: how to mix the Gaussian and the uniform density, "truncate" or "mix".
        device: device of the result.

    Returns:
        (num_bins,) float64 probabilities with sum 1.

    Source: Eq. 7 and 8 of "Why diffusion models are stable and how to make them faster" (2023).

    Example:
        >>> clts_density(0, 50_000, num_bins=4).tolist()
        [0.25, 0.25, 0.25, 0.25]
        >>> clts_density(50_000, 50_000, num_bins=4).round(decimals=3).tolist()
        [0.272, 0.267, 0.247, 0.214]
    """
    if normalize not in ("truncate", "mix"):
        raise ValueError(f"normalize must be 'truncate' or 'mix', got {normalize!r}.")
    gamma = clts_gamma(step, num_steps)
    exponent = gaussian_log_density(mean, std, num_bins, device)
    if normalize == "truncate":
        return (1 - gamma) / num_bins + gamma * exponent.softmax(0)
    mixed = (1 - gamma) + gamma * exponent.exp() / (std * sqrt(2 * pi))
    return mixed / mixed.sum()


# Callbacks that set noise levels on the module for the length of a batch


class Timesteps(NamedTuple):
    """Values of the two module attributes through which callbacks control the noise levels.

    A noise level is a number u in [0, 1]. This interval is divided into num_bins equal bins. The
    value of an attribute that the callback does not set is None.

    Attributes:
        timestep_density: (num_bins,) density from which the module samples noise levels.
        timestep_weight: (num_bins,) loss weights. The module multiplies each loss by the weight of
            the bin that contains the noise level.
    """

    timestep_density: Tensor | None = None
    timestep_weight: Tensor | None = None


def importance_weight(density: Tensor) -> Tensor:
    """Return loss weights `1 / (num_bins * p)`, which cancel the density in the expected loss.

    If noise levels are sampled from p and losses are multiplied by these weights, the expected loss
    is the same as with uniformly sampled noise levels. The function normalizes the density
    (num_bins,) to p, and returns weights (num_bins,).

    Example:
        >>> importance_weight(torch.tensor([1.0, 3.0]))
        tensor([2.0000, 0.6667])
    """
    return density.sum() / (len(density) * density)


def total_variation(density: Tensor) -> Tensor:
    """Return the total variation between a density p and the uniform density.

    The total variation is `sum(abs(p - 1 / num_bins)) / 2`.

    Args:
        density: (num_bins,) density, not necessarily normalized. The function normalizes it to p.

    Returns:
        Scalar tensor in [0, 1).

    Example:
        >>> total_variation(torch.tensor([1.0, 3.0]))
        tensor(0.2500)
    """
    return (density / density.sum() - 1 / len(density)).abs().sum() / 2


class TimestepWriter(pl.Callback, ABC):
    """Base class of callbacks that set the density of noise levels or the loss weights of a module.

    The module must have the attributes that the callback sets, and use them in its training_step.
    `Timesteps` describes these attributes. A subclass lists the attributes that it sets in the
    tuple `writes`, and returns their values from the method `timesteps_at`. Between batches, these
    attributes of the module are None.

    Two callbacks cannot set the same attribute. However, one callback may set the density while
    another callback sets the weight.

    Example:
        >>> class NoisyHalf(TimestepWriter):
        ...     writes = ("timestep_density",)
        ...
        ...     def timesteps_at(self, step, device):
        ...         return Timesteps(timestep_density=torch.tensor([0.0, 1.0], device=device))
        ...
        ...     def numbers_at(self, step, device):
        ...         return {}
        >>> NoisyHalf().timesteps_at(0, torch.device("cpu")).timestep_density
        tensor([0., 1.])
    """

    writes: tuple[str, ...] = ()
    _written = Timesteps()

    @abstractmethod
    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the values to set after `step` optimizer steps, the same on all ranks."""

    @abstractmethod
    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Return the metrics to log after `step` optimizer steps."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise ValueError if the module lacks an attribute or if two callbacks set it."""
        name = type(self).__name__
        if missing := [a for a in self.writes if not hasattr(pl_module, a)]:
            raise ValueError(
                f"{name} needs a module with {' and '.join(self.writes)}, and "
                f"{type(pl_module).__name__} lacks {' and '.join(missing)}; set it to None in "
                "its __init__ and use it in its training_step."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, TimestepWriter) and other is not self:
                shared = " and ".join(sorted({*self.writes} & {*other.writes}))
                if shared:
                    raise ValueError(
                        f"{name} and {type(other).__name__} both set {shared}; remove one of them."
                    )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Set the module's attributes. Raise ValueError if other code has set them."""
        step = trainer.global_step
        timesteps = self.timesteps_at(step, pl_module.device)
        for attribute in self.writes:
            value, name = getattr(pl_module, attribute), type(self).__name__
            if value is not None and value is not getattr(self._written, attribute):
                raise ValueError(
                    f"{name} sets {attribute}, but other code has set it to a tensor of shape "
                    f"{tuple(value.shape)}; leave it None, or remove {name}."
                )
            setattr(pl_module, attribute, getattr(timesteps, attribute))
        self._written = timesteps
        if should_log(trainer):
            pl_module.log_dict(self.numbers_at(step, pl_module.device))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Reset the module's attributes to None, if this callback has set them.

        Lightning also calls this method as `on_train_batch_end` and `on_exception`.
        """
        for attribute, value in self._written._asdict().items():
            if value is not None and getattr(pl_module, attribute) is value:
                setattr(pl_module, attribute, None)
        self._written = Timesteps()

    on_train_batch_end = on_exception = on_train_end  # type: ignore[assignment]


@dataclass(eq=False)
class _Curriculum(TimestepWriter):
    num_steps: int
    mean: float = 0.3
    std: float = 1.0
    num_bins: int = 1000
    normalize: Normalize = "truncate"

    def __post_init__(self) -> None:
        self.density_at(0)  # raises an error for invalid arguments

    def density_at(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """Return `clts_density` with this callback's arguments."""
        return clts_density(
            step, self.num_steps, self.mean, self.std, self.num_bins, self.normalize, device
        )

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Return `clts/gamma` (progress) and `clts/tv` (total variation distance to uniform)."""
        return {
            "clts/gamma": clts_gamma(step, self.num_steps),
            "clts/tv": total_variation(self.density_at(step, device)),
        }


class TimestepCurriculum(_Curriculum):
    """Samples noise levels from a density that changes from uniform to Gaussian (CLTS).

    Before each training batch, the callback sets the module's attribute `timestep_density` to the
    `clts_density` of step `trainer.global_step`. The module must sample its noise levels from this
    density. All ranks use the same density. The density depends only on the step, so a resumed run
    continues exactly without saved state. The loss is not reweighted, so the training objective
    changes.

    The callback logs the progress of the curriculum as `clts/gamma`. It logs the total variation
    distance between the curriculum's density and the uniform density as `clts/tv`. With the default
    arguments, `clts/tv` is at most 0.028. This means that at most 2.8% of the samples (3.5 in a
    batch of 128) get a different noise level than with uniform sampling.

    `trainer.global_step` counts optimizer steps. With gradient accumulation, it therefore rises
    less often than once per batch. In manual optimization, it counts every step of every optimizer.

    Args:
        num_steps: optimizer steps until the density is the Gaussian. The paper reports 50,000 for
            CIFAR-10 and 300,000 for ImageNet-128.
        mean: mean of the Gaussian: the noise level u in [0, 1] that is sampled most.
        std: standard deviation of the Gaussian in units of u. The paper uses 1.0 (sigma = T).
        num_bins: number of equal bins over [0, 1]. With num_bins = T, the density is the paper's
            density over the times t = 1, ..., T.
        normalize: how to mix the Gaussian and the uniform density, "truncate" or "mix". See
            `clts_density`.

    Raises:
        ValueError: if an argument is invalid. At fit start, the error is also raised if the module
            has no attribute `timestep_density`, or if another callback sets this attribute too. At
            the start of a batch, the error is also raised if other code has set this attribute.

    Source: Eq. 7 and 8 of "Why diffusion models are stable and how to make them faster" (2023).

    Example:
        >>> TimestepCurriculum(num_steps=50_000).density_at(step=25_000).shape
        torch.Size([1000])
    """

    writes = ("timestep_density",)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the density of this step."""
        return Timesteps(timestep_density=self.density_at(step, device))


class CurriculumWeight(_Curriculum):
    """Control experiment for `TimestepCurriculum`: weights the loss by the curriculum's density.

    The loss at a noise level in bin i is multiplied by `num_bins * p[i]`, where p is the
    `clts_density` of the step. The callback does not change how the module samples noise levels. If
    the module samples them uniformly, the expected gradients are the same as with
    `TimestepCurriculum`, and only the variance of the gradients differs. The docstring of
    `TimestepCurriculum` describes the arguments.

    Example:
        >>> curriculum = CurriculumWeight(num_steps=100, num_bins=4)
        >>> density, weight = curriculum.timesteps_at(0, torch.device("cpu"))
        >>> density, weight.tolist()
        (None, [1.0, 1.0, 1.0, 1.0])
    """

    writes = ("timestep_weight",)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the loss weight of this step."""
        return Timesteps(timestep_weight=self.num_bins * self.density_at(step, device))


class ImportanceWeightedCurriculum(_Curriculum):
    """Control experiment for `TimestepCurriculum`: loss weights cancel the effect of its density.

    The module samples noise levels from p, the `clts_density` of the step. The loss at a noise
    level in bin i is divided by `num_bins * p[i]`. The expected gradients are therefore the same as
    with uniformly sampled noise levels. If `TimestepCurriculum` gives a better model than this
    control, the reason is the changed objective. The Gaussian must be wide enough that no bin
    has probability 0. The docstring of `TimestepCurriculum` describes the arguments.

    Example:
        >>> curriculum = ImportanceWeightedCurriculum(num_steps=100, num_bins=4)
        >>> density, weight = curriculum.timesteps_at(100, torch.device("cpu"))
        >>> (density * weight).round(decimals=9).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    writes = ("timestep_density", "timestep_weight")

    def __post_init__(self) -> None:
        if not self.density_at(self.num_steps).all():
            raise ValueError(
                "importance weights need a density above 0 everywhere, and a Gaussian with std "
                f"{self.std} and mean {self.mean} is 0 in some bins; use a larger std."
            )

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the density and the loss weight of this step."""
        density = self.density_at(step, device)
        return Timesteps(density, importance_weight(density))
