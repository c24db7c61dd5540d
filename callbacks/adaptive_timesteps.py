"""Learn the density of noise levels from how much training at each level lowers the objective."""

from copy import deepcopy
from operator import itemgetter
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import softplus

from lit_diffusion.callbacks.curriculum import Timesteps, TimestepWriter, total_variation
from lit_diffusion.callbacks.evaluation import FixedImages, inference_mode, require_noise_levels
from lit_diffusion.callbacks.info_noise import (
    information_weight,
    noise_levels,
    require_denoising_loss,
    require_weight,
    velocity_error,
    weight_at,
)
from lit_diffusion.callbacks.trainer_state import all_gather_objects, is_accumulating, reshard
from lit_diffusion.protocols import Condition, by_part
from lit_diffusion.seeding import fold, run_seed

UNIFORM = 0.5413248546129181  # softplus of this is 1, and Beta(1, 1) is uniform


def beta_log_density(parameters: Tensor, num_bins: int) -> Tensor:
    """Compute the log-probabilities of equal bins of u under a Beta density.

    Args:
        parameters: (2,) float64. The Beta density has the shape parameters
            `a, b = softplus(parameters)`.
        num_bins: number of bins.

    Returns:
        (num_bins,) float64: `(a - 1) * log(u) + (b - 1) * log(1 - u)` at the centers of the bins,
        plus the constant that makes the probabilities of the bins sum to 1.

    Example:
        >>> parameters = torch.tensor([2.0, 2.0]).expm1().log().double()
        >>> beta_log_density(parameters, 3).exp().round(decimals=3).tolist()
        [0.263, 0.474, 0.263]
    """
    a, b = softplus(parameters)
    u = (torch.arange(num_bins, dtype=parameters.dtype) + 0.5) / num_bins
    log_density: Tensor = (a - 1) * u.log() + (b - 1) * (1 - u).log()
    return log_density.log_softmax(0)


def select_bins(reductions: Tensor, num: int) -> Tensor:
    """Select the bins whose reductions predict the sum over all bins best.

    The selected bins are those whose reductions have the largest squared correlations with the sum
    of the reductions of all bins. Therefore, the selected bins also have the largest F-statistics
    in a linear regression of this sum on the reduction of one bin.

    Args:
        reductions: (n, num_bins) float64: how much each of n >= 2 updates reduced each bin's term
            of the objective.
        num: number of bins to select.

    Returns:
        (num,) int64 indices of bins, in rising order.

    Source: Kim et al. 2025 (arXiv 2411.09998).

    Example:
        >>> select_bins(torch.tensor([[0.0, 1.0, 4.0], [0.1, 0.0, 8.0], [0.0, 1.0, 6.0]]), num=1)
        tensor([2])
    """
    x = reductions - reductions.mean(0)
    total = x.sum(1, keepdim=True)
    correlation = (x * total).sum(0) / (x.norm(dim=0) * total.norm())
    return correlation.square().nan_to_num(0).topk(num).indices.sort().values


class AdaptiveTimesteps(TimestepWriter):
    """Samples noise levels from a Beta density, and learns which levels lower the objective most.

    The objective is the variational bound on the likelihood, a sum of one term for each bin of
    noise levels. Every `every_n_steps` optimizer steps, the callback measures how much an update
    reduces the sum of `num_selected` terms of each image in the batch. This reduction is the reward
    of the noise level at which the image was trained. The callback updates the parameters of the
    Beta density with the policy gradient (REINFORCE) of the rewards. An entropy term keeps the
    density from concentrating on a few noise levels.

    The selected terms are those whose reductions best predicted the reduction of the whole
    objective in the last `queue_size` measurements. To find them, each measurement also computes
    the terms of all bins, but only for the first image of the batch. A measurement costs
    `2 * num_selected` forward passes of the batch and `2 * num_bins` forward passes of one image,
    without gradients and in eval mode. Each image has the same noise before and after the update.
    If gradients are accumulated, only the last batch of the update is measured. Measurements do not
    change the random numbers of training.

    The losses have no importance weights, so the training objective changes. All ranks share their
    rewards and use the same density. Checkpoints contain the state, so a resumed run continues
    exactly. Callbacks that save checkpoints in `on_train_batch_end` must come after this callback
    in the list of callbacks. AdaptiveTimesteps logs `adaptive_timesteps/mean`, the mean noise level
    u, and `adaptive_timesteps/tv`, the total variation between the density and the uniform density.

    The module must be a `DiffusionModule` with a `DenoisingLoss`, or have the same attributes. It
    cannot be `MeanFlow`.

    Args:
        num_bins: number of equal bins over u in [0, 1].
        every_n_steps: optimizer steps between measurements.
        num_selected: number of bins whose terms are in the reward.
        queue_size: number of recent measurements from which these bins are selected.
        lr: learning rate of Adam for the two parameters of the density. Each measurement changes
            them by about `lr`, so a change by 1 takes about `every_n_steps / lr` steps.
        entropy_weight: factor on the entropy of the density. The entropy is added to the mean of
            `reward * log_density`, with rewards that are scaled to an RMS of 1.

    Raises:
        ValueError: if an argument is invalid. At fit start, the error is also raised if the module
            is `MeanFlow`, if its loss is not a `DenoisingLoss`, if the weight of the loss is 0 in
            a bin, if the module has no attribute `timestep_density`, or if the checkpoint has a
            different num_bins or num_selected.
        TypeError: if the module does not implement `protocols.HasNoiseLevels`.

    Source: Kim et al. 2025 (Adaptive Non-uniform Timestep Sampling, arXiv 2411.09998), algorithms 1
    and 2. The defaults except num_bins are from the authors' code for CIFAR-10.

    The authors' density is the output of a network that sees the image. Here, all images share one
    density. The authors do not scale the rewards. Here, rewards are divided by their RMS, so that
    the effect of `entropy_weight` does not depend on the scale of the objective.

    In the authors' code, the reward includes the differential entropy of the density. This entropy
    is 0 for the uniform density, so it has almost no effect near the uniform density. Here, the
    entropy is separate from the reward. Three more choices are ours: the selected bins are evenly
    spaced at the start, the density is uniform at the start, and an image has the same noise before
    and after the update.

    Example:
        >>> AdaptiveTimesteps(num_bins=4).density_at().tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    writes = ("timestep_density",)

    def __init__(
        self,
        num_bins: int = 100,
        every_n_steps: int = 40,
        num_selected: int = 3,
        queue_size: int = 20,
        lr: float = 0.01,
        entropy_weight: float = 0.01,
    ) -> None:
        if not 1 <= num_selected <= num_bins:
            raise ValueError(
                "num_selected must be at least 1 and at most num_bins, got "
                f"{num_selected} and {num_bins}."
            )
        if every_n_steps < 1 or queue_size < 2:
            raise ValueError(
                "every_n_steps must be at least 1 and queue_size at least 2, got "
                f"{every_n_steps} and {queue_size}."
            )
        if not (0 < lr < float("inf") and 0 <= entropy_weight < float("inf")):
            raise ValueError(
                "lr must be above 0 and entropy_weight at least 0, both finite, got "
                f"{lr} and {entropy_weight}."
            )
        self.num_bins = num_bins
        self.every_n_steps = every_n_steps
        self.num_selected = num_selected
        self.queue_size = queue_size
        self.lr = lr
        self.entropy_weight = entropy_weight
        self._module: LightningModule | None = None
        self._batch: tuple[Tensor, Condition, Tensor] | None = None  # x0, condition, noise
        self._before: tuple[Tensor, Tensor] | None = None  # objective before the update
        self._step_before = 0
        self._batch_size = 1  # smallest B of all ranks
        self._information = torch.empty(0)  # (num_bins,) weights of the terms of the objective
        # (num_bins,) False for terms that count as 0, because the loss has the weight 0 there
        self._is_measured = torch.empty(0, dtype=torch.bool)
        self._is_loaded = False  # whether a checkpoint was loaded since `setup`
        self._reset()

    def _reset(self) -> None:
        self._parameters = torch.full((2,), UNIFORM, dtype=torch.float64, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._parameters], lr=self.lr)
        self._queue = torch.zeros(0, self.num_bins, dtype=torch.float64)
        step = self.num_bins / self.num_selected
        self._selected = ((torch.arange(self.num_selected) + 0.5) * step).long()
        self._density = self.density_at()

    def density_at(self) -> Tensor:
        """Return the present density, (num_bins,) float64 probabilities on the CPU."""
        with torch.no_grad():
            return beta_log_density(self._parameters, self.num_bins).exp()

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the present density."""
        self._density = self._density.to(device)
        return Timesteps(timestep_density=self._density)

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Return the mean noise level and the total variation from the uniform density."""
        density = self.density_at()
        u = (torch.arange(self.num_bins, dtype=torch.float64) + 0.5) / self.num_bins
        return {
            "adaptive_timesteps/mean": float(density @ u),
            "adaptive_timesteps/tv": float(total_variation(density)),
        }

    def learn(self, bins: Tensor, rewards: Tensor) -> None:
        """Change the density by one step of policy gradient.

        Args:
            bins: (B,) int64 bins of the noise levels of the batch.
            rewards: (B,) float64 rewards. If all of them are 0, or if one is not finite, the
                density does not change.
        """
        scale = rewards.square().mean().sqrt()
        if not 0 < scale < float("inf"):
            return
        with torch.enable_grad():
            log_density = beta_log_density(self._parameters, self.num_bins)
            entropy = -(log_density.exp() * log_density).sum()
            gain = (rewards / scale * log_density[bins]).mean() + self.entropy_weight * entropy
            self._parameters.grad = torch.autograd.grad(-gain, self._parameters)[0]
        self._optimizer.step()
        self._density = self.density_at()

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters of the density, the state of Adam, and the last reductions."""
        return {
            "parameters": self._parameters.detach().clone(),
            "optimizer": deepcopy(self._optimizer.state_dict()),
            "queue": self._queue,
            "selected": self._selected,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the checkpoint."""
        queue, selected = state_dict["queue"], state_dict["selected"]
        if (queue.shape[1], len(selected)) != (self.num_bins, self.num_selected):
            raise ValueError(
                f"the checkpoint has {queue.shape[1]} bins, of which {len(selected)} are selected, "
                f"and this is AdaptiveTimesteps(num_bins={self.num_bins}, "
                f"num_selected={self.num_selected}); use the numbers of the checkpoint."
            )
        self._reset()
        with torch.no_grad():
            self._parameters.copy_(state_dict["parameters"])
        self._optimizer.load_state_dict(state_dict["optimizer"])
        self._optimizer.param_groups[0]["lr"] = self.lr  # it may differ from the checkpoint's
        self._queue, self._selected = queue, selected
        self._density = self.density_at()
        self._is_loaded = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise TypeError if the module does not implement `protocols.HasNoiseLevels`."""
        require_noise_levels(pl_module, "AdaptiveTimesteps")
        self._is_loaded = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with the density of the checkpoint, or with the uniform density.

        If no checkpoint is given and this callback's last fit trained the same module, continue
        with the density of that fit.
        """
        super().on_fit_start(trainer, pl_module)
        require_denoising_loss(pl_module, "AdaptiveTimesteps")
        levels = noise_levels(pl_module, self.num_bins)
        require_weight(pl_module, "AdaptiveTimesteps", levels, None)
        if not self._is_loaded and (trainer.ckpt_path is not None or pl_module is not self._module):
            self._reset()
        self._module = pl_module
        self._batch = self._before = None
        self._information = information_weight(levels).sum(1)
        u = (torch.arange(self.num_bins, dtype=torch.float64) + 0.5) / self.num_bins
        self._is_measured = weight_at(pl_module, u, None) > 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        """Set the density. If a measurement is due, compute the objective before the update."""
        super().on_train_batch_start(trainer, pl_module, *args)
        if trainer.global_step % self.every_n_steps or is_accumulating(trainer):
            return
        self._step_before = trainer.global_step
        images, condition = args[0][:2]
        key = (run_seed() or 0, trainer.global_rank, trainer.global_step)
        seeds = [fold("adaptive timesteps", *key, i) for i in range(len(images))]
        self._batch = FixedImages(images, condition, seeds).encode(pl_module)
        # All ranks must call the network the same number of times, and B may differ between ranks.
        self._batch_size = min(all_gather_objects(len(images), trainer.world_size))
        self._before = self._objective(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """After a measured update, learn from the reduction of the objective."""
        super().on_train_batch_end(trainer, pl_module)
        if self._before is not None and trainer.global_step > self._step_before:
            after = self._objective(trainer, pl_module)
            rewards, reductions = (a - b for a, b in zip(self._before, after, strict=True))
            # In float32, t / T may be rounded down into the bin below.
            bins = ((outputs["u"].cpu().double() + 1e-7) * self.num_bins).long()
            measured = (bins.clamp(0, self.num_bins - 1), rewards, reductions)
            ranks = all_gather_objects(measured, trainer.world_size)
            all_bins, all_rewards, rows = zip(*ranks, strict=True)
            self.learn(torch.cat(all_bins), torch.cat(all_rewards))
            row = torch.stack(rows).mean(0, keepdim=True)
            if row.isfinite().all():
                self._queue = torch.cat([self._queue, row])[-self.queue_size :]
            if len(self._queue) > 1:
                self._selected = select_bins(self._queue, self.num_selected)
        self._batch = self._before = None

    def _objective(self, trainer: Trainer, module: Any) -> tuple[Tensor, Tensor]:
        """Return the selected terms (B,) of each image, and all terms (num_bins,) of the first."""
        x0, condition, noise = cast(tuple[Tensor, Condition, Tensor], self._batch)
        levels = torch.arange(self.num_bins)

        def terms(rows: Tensor, bins: Tensor) -> Tensor:
            u = ((bins.double() + 0.5) / self.num_bins).to(x0.device)
            t, rows = module.times.quantile(u, module.process), rows.to(x0.device)
            labels = by_part(itemgetter(rows), condition)
            losses = module.per_sample_loss(x0[rows], labels, t, noise[rows])
            errors = velocity_error(module, u, losses, None)
            return (errors.cpu() * self._information[bins]).where(self._is_measured[bins], 0.0)

        with inference_mode(trainer, module):
            rows, parts = torch.arange(len(x0)), torch.split(levels, self._batch_size)
            selected = [terms(rows, bin_.expand(len(x0))) for bin_ in self._selected]
            of_first = [terms(torch.zeros_like(bins), bins) for bins in parts]
        reshard(module)
        return torch.stack(selected).sum(0), torch.cat(of_first)
