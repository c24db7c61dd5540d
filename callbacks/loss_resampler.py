"""Sample noise levels with a density that is computed from their recent losses."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .curriculum import Timesteps, TimestepWriter, importance_weight, total_variation
from .trainer_state import all_gather_objects

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]


class LossHistory(NamedTuple):
    """Recent losses of each bin of noise levels u in [0, 1].

    Attributes:
        losses: (num_bins, history) float64. Loss n = 0, 1, ... of a bin is in column
            `n % history`.
        counts: (num_bins,) int64 number of losses that each bin has received so far.
    """

    losses: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, num_bins: int, history: int) -> "LossHistory":
        """Return a history without losses."""
        losses = torch.zeros(num_bins, history, dtype=torch.float64)
        return cls(losses, torch.zeros(num_bins, dtype=torch.int64))

    def to(self, device: torch.device | str) -> "LossHistory":
        """Return the history on another device."""
        return LossHistory(self.losses.to(device), self.counts.to(device))


def update_history(history: LossHistory, bins: Tensor, losses: Tensor) -> LossHistory:
    """Add the losses of a batch to a history. Each loss replaces the oldest loss of its bin.

    Args:
        history: the losses so far, which are not changed.
        bins: (B,) int64, the bin of each loss. A loss whose bin is `num_bins` is dropped.
        losses: (B,) losses, the oldest first.

    Example:
        >>> history = LossHistory.empty(num_bins=2, history=2)
        >>> update_history(history, torch.tensor([1, 1, 0, 1]), torch.tensor([5.0, 6, 7, 8])).losses
        tensor([[7., 0.],
                [8., 6.]], dtype=torch.float64)
    """
    size = history.losses.shape[1]
    columns, counts = pad(history.losses, (0, 0, 0, 1)), pad(history.counts, (0, 1))
    bins, order = bins.sort(stable=True)
    first = torch.searchsorted(bins, bins)
    total = torch.searchsorted(bins, bins, right=True) - first
    nth = torch.arange(len(bins), device=bins.device) - first  # position in its bin's losses
    # If several losses go to the same column, all of them write the value of the last one.
    last = first + nth + (total - 1 - nth) // size * size
    columns.index_put_((bins, (counts[bins] + nth) % size), losses.to(columns)[order][last])
    counts.index_add_(0, bins, torch.ones_like(bins))
    return LossHistory(columns[:-1], counts[:-1])


class LossBasedDensity(TimestepWriter):
    """Base class of callbacks that compute the density of noise levels from recent losses.

    A subclass sets the module's attribute `timestep_density`, and the module samples its noise
    levels from this density. A subclass may also set the attribute `timestep_weight`, which
    contains factors by which the module multiplies its losses.

    The module's training_step must return a dictionary with "loss", "u" and "per_sample_loss". The
    entry "u" contains the noise level of each sample, in [0, 1]. If your module has discrete times
    t = 0, ..., T - 1, return `u = t / T`. The entry "per_sample_loss" contains the loss of each
    sample, before it is multiplied by `timestep_weight`.

    The losses of all ranks are gathered, and non-finite losses are dropped. Checkpoints contain the
    history, so a resumed run continues exactly. If another callback saves checkpoints in
    `on_train_batch_end`, list it after this callback. Otherwise, the checkpoints lack the losses of
    the last batch. Lightning's own checkpoint callbacks may be anywhere in the list, because
    Lightning runs them last.

    Args:
        num_bins: number of equal bins over [0, 1]. With fewer bins, all histories are full sooner.
        history: number of recent losses stored for each bin.
        uniform_prob: fraction of noise levels that are sampled uniformly, in (0, 1].

    Raises:
        ValueError: if an argument is invalid. At fit start, the error is also raised if the module
            lacks an attribute that the callback sets, or if the checkpoint has a different num_bins
            or history. During training, the error is also raised if other code has set such an
            attribute, or if training_step does not return "u" and "per_sample_loss".

    Example:
        >>> class LastLoss(LossBasedDensity):
        ...     writes, logged = ("timestep_density",), "last_loss"
        ...
        ...     def density(self, history):
        ...         return history.losses[:, 0] / history.losses[:, 0].sum()
        >>> callback = LastLoss(num_bins=20, history=1, uniform_prob=0.1)
    """

    logged: str
    """Prefix of two metrics: `<logged>/full`, the fraction of bins with a full history, and
    `<logged>/tv`, the total variation between the density and the uniform density."""

    def __init__(self, num_bins: int, history: int, uniform_prob: float) -> None:
        if min(num_bins, history) < 1:
            raise ValueError(
                f"num_bins and history must be at least 1, got {num_bins} and {history}."
            )
        if not 0 < uniform_prob <= 1:
            raise ValueError(
                f"uniform_prob must be in (0, 1], got {uniform_prob}; a bin with probability 0 "
                "would never be drawn again."
            )
        self.num_bins = num_bins
        self.history = history
        self.uniform_prob = uniform_prob
        self._state = LossHistory.empty(num_bins, history)
        self._is_loaded = False  # whether a checkpoint was loaded since `setup`
        self._is_checked = False  # whether outputs of training_step were checked in this fit
        self._module: pl.LightningModule | None = None

    @abstractmethod
    def density(self, history: LossHistory) -> Tensor:
        """Return the probabilities (num_bins,) of the bins in float64.

        Until every bin has a full history, all entries are 1, which means the uniform density.
        """

    def recorded_losses(self, pl_module: pl.LightningModule, outputs: dict[str, Tensor]) -> Tensor:
        """Return the losses (B,) to record for a batch, by default "per_sample_loss"."""
        return outputs["per_sample_loss"]

    def mix_with_uniform(self, history: LossHistory, masses: Tensor) -> Tensor:
        """Normalize the masses (num_bins,) of the bins, and mix them with the uniform density.

        If a bin does not have a full history yet, or if all masses are 0, all entries of the result
        are 1, which means the uniform density.
        """
        full = (history.counts >= self.history).all() & (masses.sum() > 0)
        mixed = (1 - self.uniform_prob) * masses / masses.sum() + self.uniform_prob / self.num_bins
        return torch.where(full, mixed, torch.ones_like(mixed))

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the density computed from the losses so far.

        If the callback sets `timestep_weight`, also return the importance weights.
        """
        self._state = self._state.to(device)
        density = self.density(self._state)
        is_reweighted = "timestep_weight" in self.writes
        return Timesteps(density, importance_weight(density) if is_reweighted else None)

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Return the metrics that the attribute `logged` describes."""
        full = (self._state.counts >= self.history).double().mean()
        tv = total_variation(self.density(self._state))
        return {f"{self.logged}/full": full, f"{self.logged}/tv": tv}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as "losses" and the counts as "seen", as CPU tensors."""
        losses, counts = self._state.to("cpu")
        return {"losses": losses, "seen": counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history of the checkpoint."""
        stored = LossHistory(state_dict["losses"], state_dict["seen"])
        if stored.losses.shape != self._state.losses.shape:
            num_bins, history = stored.losses.shape
            raise ValueError(
                f"the checkpoint's history has {num_bins} bins with {history} losses each, and "
                f"this is {type(self).__name__}(num_bins={self.num_bins}, history={self.history}); "
                "use the numbers of the checkpoint."
            )
        self._state, self._is_loaded = stored, True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record that no checkpoint is loaded yet. Lightning may load one after this hook."""
        self._is_loaded = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start with the history of the checkpoint, or with an empty history.

        If no checkpoint is given and this callback's last fit trained the same module, continue
        with the history of that fit.
        """
        super().on_fit_start(trainer, pl_module)
        if not self._is_loaded and (trainer.ckpt_path is not None or pl_module is not self._module):
            self._state = LossHistory.empty(self.num_bins, self.history)
        self._module = pl_module
        self._is_checked = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Record the losses of all ranks."""
        super().on_train_batch_end(trainer, pl_module)
        if not self._is_checked:
            _check_outputs(outputs, pl_module, type(self).__name__)
            self._is_checked = True
        losses = self.recorded_losses(pl_module, outputs)
        pairs = torch.stack([outputs["u"].double(), losses.double()]).detach()
        if trainer.world_size > 1:  # B may differ between ranks
            shares = all_gather_objects(pairs.cpu(), trainer.world_size)
            pairs = torch.cat(shares, dim=1).to(pairs.device)
        u, losses = pairs
        # In float32, t / T may be rounded down into the bin below.
        bins = ((u + 1e-7) * self.num_bins).long().clamp(0, self.num_bins - 1)
        bins = bins.masked_fill(~losses.isfinite(), self.num_bins)
        self._state = update_history(self._state, bins, losses)


class LossSecondMomentResampler(LossBasedDensity):
    """Samples noise levels in proportion to the RMS of their recent losses, and reweights the loss.

    Importance weights on the loss keep the gradients unbiased. Noise levels are sampled uniformly
    until each bin has `history` losses. With 4,000 bins and `history=10`, this takes about 100,000
    samples. The callback logs `resampler/full`, the fraction of bins with `history` losses, and
    `resampler/tv`, the total variation between the density and the uniform density.

    The module needs the attributes `timestep_density` and `timestep_weight`, and its training_step
    must return `u` and `per_sample_loss`. The docstring of `LossBasedDensity` describes these
    outputs and the errors that can be raised.

    Args:
        num_bins: number of equal bins over [0, 1]. With fewer bins, all histories are full sooner.
        history: number of recent losses stored for each bin.
        uniform_prob: fraction of noise levels that are sampled uniformly, in (0, 1].

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 18 and section 3.3.

    Example:
        >>> resampler = LossSecondMomentResampler(num_bins=4000)
        >>> {name: tuple(value.shape) for name, value in resampler.state_dict().items()}
        {'losses': (4000, 10), 'seen': (4000,)}
    """

    writes = ("timestep_density", "timestep_weight")
    logged = "resampler"

    def __init__(self, num_bins: int, history: int = 10, uniform_prob: float = 0.001) -> None:
        super().__init__(num_bins, history, uniform_prob)

    def density(self, history: LossHistory) -> Tensor:
        """Return a density proportional to the RMS losses, mixed with the uniform density."""
        rms = torch.linalg.vector_norm(history.losses, dim=1)  # times sqrt(history), which cancels
        return self.mix_with_uniform(history, rms)


class LossDensity(LossBasedDensity):
    """Samples noise levels in proportion to the mean of their recent losses, without reweighting.

    Without reweighting, the training objective changes: noise levels with a large `per_sample_loss`
    get more samples, and a noise level with a loss near 0 gets almost none. Noise levels are
    sampled uniformly until each bin has `history` losses. The callback logs `loss_density/full`,
    the fraction of bins with `history` losses, and `loss_density/tv`, the total variation between
    the density and the uniform density.

    The module needs the attribute `timestep_density`, and its training_step must return `u` and
    `per_sample_loss`. The docstring of `LossBasedDensity` describes these outputs and the errors
    that can be raised.

    Args:
        num_bins: number of equal bins over [0, 1]. With fewer bins, all histories are full sooner.
        history: number of recent losses stored for each bin.
        uniform_prob: fraction of noise levels that are sampled uniformly, in (0, 1].

    Source: lit-diffusion. Its page docs/results/stability.md has measurements.

    Example:
        >>> LossDensity(num_bins=20).writes
        ('timestep_density',)
    """

    writes = ("timestep_density",)
    logged = "loss_density"

    def __init__(self, num_bins: int = 20, history: int = 64, uniform_prob: float = 0.1) -> None:
        super().__init__(num_bins, history, uniform_prob)

    def density(self, history: LossHistory) -> Tensor:
        """Return a density proportional to the mean losses, mixed with the uniform density."""
        return self.mix_with_uniform(history, history.losses.mean(1).clamp(min=0))


def _check_outputs(outputs: Any, module: pl.LightningModule, name: str) -> None:
    values = outputs if isinstance(outputs, dict) else {}
    shapes = {key: tuple(v.shape) for key, v in values.items() if isinstance(v, Tensor)}
    shape = shapes.get("u", ())
    if len(shape) != 1 or shapes.get("per_sample_loss") != shape:
        raise ValueError(
            f"{name} needs a training_step that returns {{'loss': ..., 'u': (B,), "
            f"'per_sample_loss': (B,)}}, and {type(module).__name__} returned tensors with "
            f"the shapes {shapes}; add what is missing, or leave out {name}."
        )
    low, high = values["u"].aminmax()
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"training_step must return u in [0, 1], got {low:g} to {high:g}; divide "
            "timesteps by the number of steps."
        )
