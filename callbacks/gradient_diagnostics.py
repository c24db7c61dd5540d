"""Measure norms, noise scales and cosines of the gradients at several noise levels."""

from contextlib import nullcontext
from itertools import combinations
from operator import itemgetter
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.evaluation import (
    FixedImages,
    PeriodicEvaluation,
    read_fixed_images,
    require_noise_levels,
)
from lit_diffusion.callbacks.trainer_state import eval_mode, find_dtensor
from lit_diffusion.distributed import total_norm
from lit_diffusion.metrics.images import BatchKey
from lit_diffusion.protocols import Condition, by_part


def signal_and_noise(first: Tensor, second: Tensor, batch_size: int) -> tuple[float, float]:
    """Estimate the squared norm of the gradient and the variance of the gradient from two batches.

    Let G be the expected gradient, and Sigma the covariance of the gradient of one sample. The
    simple noise scale is `tr(Sigma) / |G|**2`. This is the batch size at which the variance of the
    batch's gradient equals the squared norm of the expected gradient.

    Args:
        first: mean gradient (P,) of one batch.
        second: mean gradient (P,) of another batch.
        batch_size: number of samples in each of the two batches.

    Returns:
        Unbiased estimates of `|G|**2` and `tr(Sigma)`.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), section 2.2 and appendix A.1. In contrast to
    the paper, the two batches have equal sizes.

    Example:
        >>> signal_and_noise(torch.tensor([3.0, 1.0]), torch.tensor([3.0, -1.0]), batch_size=8)
        (8.0, 16.0)
    """
    noise = 0.5 * batch_size * (first - second).square().sum()
    return (first @ second).item(), noise.item()


def random_halves(num: int) -> Tensor:
    """Split the indices 0, ..., num - 1 into two random halves, which are the same in every call.

    The halves are random because data sets are often sorted by class.

    Returns:
        (2, num // 2) int64 indices.
    """
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    return order[: num // 2 * 2].view(2, -1)


class GradientDiagnostics(PeriodicEvaluation):
    """Logs statistics of the gradients at several noise levels, on fixed training images and noise.

    The noise levels are `u = (i + 1/2) / num_levels` for i = 0, ..., num_levels - 1, on a scale
    from 0 (cleanest) to 1 (noisiest). With four levels, the metrics are, for example:

    - `grad/norm_u0.125`: norm of the mean gradient at the noise level u = 0.125.
    - `grad/cosine_u0.125_u0.375`: cosine of the angle between the mean gradients at two noise
      levels. A negative cosine means that the two gradients conflict.
    - `grad/noise_scale_u0.125`: the batch size at which the variance of the batch's gradient equals
      the squared norm of the expected gradient. The variance and the squared norm are estimated
      from two halves of the images. The noise scale is inf if the estimated squared norm is not
      above 0.
    - `grad/update_ratio`: norm of the last update divided by the norm of the weights.

    Gradients are computed in eval mode, with the raw weights, not the EMA weights. The precision is
    that of the Trainer, or float32 if the Trainer has "16-mixed", because gradients in float16
    underflow without the loss scaling of training. Training is unaffected, because these
    gradients are not accumulated and the states of the random generators are restored. Each rank
    computes all metrics, and rank 0 logs them. A measurement costs `2 * num_levels` forward and
    backward passes, each with half of the images.

    Args:
        every_n_steps: optimizer steps between measurements.
        num_levels: number of noise levels, >= 1.
        num_images: number of images, which must be even. At each noise level, one gradient is
            computed for each half of the images.
        images: where the images are in a batch: an index, a key, or a function of the batch. None
            uses the batch if it is a tensor, its first item if it is a tuple or list, and its only
            4-dimensional tensor if it is a dictionary.

    Raises:
        ValueError: if an argument is invalid, if no data set can be indexed, or if weights are
            split over ranks.
        TypeError: if the module does not implement `protocols.HasNoiseLevels`.

    Example:
        >>> GradientDiagnostics(num_levels=2).metric_names()[:3]
        ['grad/norm_u0.25', 'grad/norm_u0.75', 'grad/noise_scale_u0.25']
    """

    def __init__(
        self,
        every_n_steps: int = 200,
        num_levels: int = 4,
        num_images: int = 32,
        images: BatchKey = None,
    ) -> None:
        super().__init__(every_n_steps)
        if num_levels < 1 or num_images < 2 or num_images % 2:
            raise ValueError(
                "num_levels must be at least 1 and num_images even and at least 2, got "
                f"{num_levels} and {num_images}."
            )
        self.levels = [(i + 0.5) / num_levels for i in range(num_levels)]
        self.num_images = num_images
        self.images = images
        self._fixed: FixedImages | None = None
        self._weights_before: list[Tensor] = []

    def metric_names(self) -> list[str]:
        """Metric names for each noise level, each pair of noise levels, and the last update."""
        names = [f"grad/{kind}_u{u:.3g}" for kind in ("norm", "noise_scale") for u in self.levels]
        pairs = combinations(self.levels, 2)
        return [*names, *(f"grad/cosine_u{u:.3g}_u{v:.3g}" for u, v in pairs), "grad/update_ratio"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise TypeError if the module does not implement `protocols.HasNoiseLevels`."""
        super().setup(trainer, pl_module, stage)
        require_noise_levels(pl_module, "GradientDiagnostics")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if weights, and with them the gradients, are split over ranks."""
        if split := find_dtensor(dict(pl_module.named_parameters())):
            raise ValueError(
                "GradientDiagnostics needs whole gradients, but the weight "
                f"{split!r} is split over ranks; remove GradientDiagnostics."
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the images, so that unsuitable data raise an error before the first step."""
        super().on_train_start(trainer, pl_module)
        self._fixed = read_fixed_images(trainer.train_dataloader, self.num_images, self.images)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Copy the weights before an update after which metrics are measured."""
        if (trainer.global_step + 1) % cast(int, self.every_n_steps) == 0:
            self._weights_before = [p.detach().clone() for p in _trainable(pl_module)]

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return all metrics by name on rank 0, and {} on the other ranks."""
        plugin = trainer.precision_plugin
        uses_float16 = getattr(plugin, "scaler", None) is not None
        precision = nullcontext() if uses_float16 else plugin.forward_context()
        with isolate_rng(), eval_mode(pl_module), precision:
            assert self._fixed is not None
            batch = self._fixed.encode(pl_module)
            halves = [_half_gradients(pl_module, u, *batch) for u in self.levels]
        metrics: dict[str, float] = {}
        means = [(a + b) / 2 for a, b in halves]
        for u, (a, b), mean in zip(self.levels, halves, means, strict=True):
            signal, noise = signal_and_noise(a, b, len(batch[0]) // 2)
            metrics[f"grad/norm_u{u:.3g}"] = mean.norm().item()
            metrics[f"grad/noise_scale_u{u:.3g}"] = noise / signal if signal > 0 else float("inf")
        for (u, a), (v, b) in combinations(zip(self.levels, means, strict=True), 2):
            cosine = torch.cosine_similarity(a, b, dim=0).item()
            metrics[f"grad/cosine_u{u:.3g}_u{v:.3g}"] = cosine
        if self._weights_before:
            weights = [p.detach() for p in _trainable(pl_module)]
            update = [a - b for a, b in zip(weights, self._weights_before, strict=True)]
            norm = max(total_norm(weights).item(), 1e-30)
            metrics["grad/update_ratio"] = total_norm(update).item() / norm
            self._weights_before = []
        return metrics if trainer.is_global_zero else {}


def _half_gradients(
    pl_module: LightningModule, u: float, x0: Tensor, labels: Condition, noise: Tensor
) -> list[Tensor]:
    """Compute the mean gradients, each (P,), of the two halves of the images at noise level u."""
    module, parameters = cast(Any, pl_module), _trainable(pl_module)
    t = module.process.from_unit(torch.full((len(x0),), u, dtype=torch.float64)).to(x0.device)
    gradients = []
    for i in random_halves(len(x0)).to(x0.device):
        with torch.enable_grad():
            condition = by_part(itemgetter(i), labels)
            loss = module.per_sample_loss(x0[i], condition, t[i], noise[i]).mean()
            parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients.append(torch.cat([g.float().flatten() for g in parts]))
    return gradients


def _trainable(module: LightningModule) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]
