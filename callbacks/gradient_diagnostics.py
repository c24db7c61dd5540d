"""What gradients of different noise levels have to do with each other, and how noisy they are."""

from itertools import combinations
from operator import itemgetter
from typing import Any, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.noise_level_loss import read_fixed
from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps, log_in_row_of_step
from lit_diffusion.metrics.batches import Where
from lit_diffusion.modes import eval_mode
from lit_diffusion.protocols import HasNoiseLevels, by_part
from lit_diffusion.seeding import PerSampleNoise


def signal_and_noise(first: Tensor, second: Tensor, batch_size: int) -> tuple[float, float]:
    """|G|^2 and tr(Sigma), unbiased, of gradients (P,) of two batches of so many samples each.

    G is the mean gradient of a sample, Sigma the covariance; tr(Sigma) / |G|^2 is the simple noise
    scale, the batch size at which noise is as large as signal.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), section 2.2 and appendix A.1; by halves.

    Example:
        >>> signal_and_noise(torch.tensor([3.0, 1.0]), torch.tensor([3.0, -1.0]), batch_size=8)
        (8.0, 16.0)
    """
    noise = 0.5 * batch_size * (first - second).square().sum()
    return (first @ second).item(), noise.item()


def halves_of(num: int) -> Tensor:
    """(2, num // 2) places in a random order, always the same: sets are often sorted by class."""
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    return order[: num // 2 * 2].view(2, -1)


class GradientDiagnostics(RunsEveryNSteps):
    """Logs gradients of fixed training images with fixed noise, by noise level, every n steps.

    At levels u = (i + 1/2) / num_levels, of which 1 is the noisiest:

    - `grad/norm_u0.125`: of the mean gradient;
    - `grad/cosine_u0.125_u0.375`: between the mean gradients of two levels. Below 0 they disagree;
    - `grad/noise_scale_u0.125`: samples of a batch at which noise is as large as signal, by two
      halves of the images. inf where no signal shows;
    - `grad/update_ratio`: length of the last update over that of the weights.

    The weights are those that are trained, in eval mode. Nothing of training changes: gradients are
    not accumulated, and no random number is taken. Each rank computes all of it; rank 0 logs. The
    cost is that of 2 num_levels passes of half the images, every n steps.

    Args:
        every_n_steps: optimizer steps between measurements.
        num_levels: of noise.
        num_images: even, half of them for each estimate.
        images: where the images of a batch are, as of `FIDEvaluation`.

    Raises:
        ValueError: bad numbers, or data that can't be read at an index; at fit start, weights that
            are split over ranks.
        TypeError: for a module that is not `protocols.HasNoiseLevels`.

    Example:
        >>> GradientDiagnostics(num_levels=2).metric_names()[:3]
        ['grad/norm_u0.25', 'grad/norm_u0.75', 'grad/noise_scale_u0.25']
    """

    def __init__(
        self,
        every_n_steps: int = 200,
        num_levels: int = 4,
        num_images: int = 32,
        images: Where = None,
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
        self._fixed: Any = None
        self._before: list[Tensor] = []

    def metric_names(self) -> list[str]:
        """Of each level, of each pair of levels, and of the update."""
        known = [f"grad/{kind}_u{u:.3g}" for kind in ("norm", "noise_scale") for u in self.levels]
        pairs = combinations(self.levels, 2)
        return [*known, *(f"grad/cosine_u{u:.3g}_u{v:.3g}" for u, v in pairs), "grad/update_ratio"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that can't be asked."""
        super().setup(trainer, pl_module, stage)
        self._fixed = None
        if lacking := [n for n in ("per_sample_loss", "process") if not hasattr(pl_module, n)]:
            raise TypeError(
                "GradientDiagnostics needs a module with per_sample_loss and process "
                f"(protocols.HasNoiseLevels); {type(pl_module).__name__} lacks "
                f"{' and '.join(lacking)}."
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep the weights where the update is to be measured."""
        n = cast(int, self.every_n_steps)
        if (trainer.global_step + 1) % n == 0:
            self._before = [p.detach().clone() for p in _trained(pl_module)]

    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, for the loggers."""
        found = self._of_levels(trainer, pl_module)
        if self._before:
            weights = [p.detach() for p in _trained(pl_module)]
            moved = [a - b for a, b in zip(weights, self._before, strict=True)]
            found["grad/update_ratio"] = _length(moved) / max(_length(weights), 1e-30)
            self._before = []
        if trainer.is_global_zero:
            log_in_row_of_step(trainer, found)

    def _of_levels(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        with isolate_rng(), eval_mode(pl_module), trainer.precision_plugin.forward_context():
            if self._fixed is None:
                self._fixed = read_fixed(trainer.train_dataloader, self.num_images, self.images)
            halves = [self._gradients(pl_module, u) for u in self.levels]
        found: dict[str, float] = {}
        means = [(a + b) / 2 for a, b in halves]
        for u, (a, b), mean in zip(self.levels, halves, means, strict=True):
            signal, noise = signal_and_noise(a, b, len(self._fixed[2]) // 2)
            found[f"grad/norm_u{u:.3g}"] = mean.norm().item()
            found[f"grad/noise_scale_u{u:.3g}"] = noise / signal if signal > 0 else float("inf")
        for (u, a), (v, b) in combinations(zip(self.levels, means, strict=True), 2):
            cosine = torch.cosine_similarity(a, b, dim=0).item()
            found[f"grad/cosine_u{u:.3g}_u{v:.3g}"] = cosine
        return found

    def _gradients(self, pl_module: LightningModule, u: float) -> tuple[Tensor, ...]:
        """(P,) mean gradient of each half of the images at a level."""
        module, (images, labels, indices) = cast(HasNoiseLevels, pl_module), self._fixed
        x0 = module.codec.encode(images.to(pl_module.device))
        noise = PerSampleNoise(indices, stream="noise level").randn_like(x0)
        if module.num_classes is None and getattr(module, "conditioning", None) is None:
            labels = None
        labels = move_data_to_device(labels, x0.device)
        t = module.process.from_unit(torch.full((len(x0),), u, dtype=torch.float64)).to(x0.device)
        parameters = _trained(pl_module)
        found = []
        for i in halves_of(len(x0)).to(x0.device):
            with torch.enable_grad():
                told = by_part(itemgetter(i), labels)
                loss = module.per_sample_loss(x0[i], told, t[i], noise[i]).mean()
                each = torch.autograd.grad(loss, parameters, materialize_grads=True)
            found.append(torch.cat([g.float().flatten() for g in each]))
        return tuple(found)


def _trained(module: LightningModule) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def _length(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.float().norm() for t in tensors]).norm())
