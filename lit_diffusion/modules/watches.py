"""Finding what is not finite, and when it began, without waiting for the device at every step."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_diffusion.protocols import Denoise, Denoised, NonFiniteSamples


class LossWatch:
    """Remembers the first loss that is not finite, on the device, so that nobody waits for it."""

    def __init__(self) -> None:
        self._first: Tensor | None = None  # (step, u); u is infinite while all is well

    def see(self, losses: Tensor, u: Tensor, step: int) -> None:
        """Note the losses (B,) at ranks u (B,) of optimizer step `step`."""
        least = u.masked_fill(losses.isfinite(), torch.inf).min()
        now = torch.stack([torch.full_like(least, step), least])
        first = now if self._first is None else self._first
        self._first = torch.where(first[1].isinf(), now, first)

    def first_bad(self) -> tuple[int, float] | None:
        """Step and u of the first loss that is not finite, if any; waits for the device."""
        if self._first is None or self._first[1].isinf():
            return None
        step, u = self._first.tolist()
        return int(step), u


class SampleWatch:
    """A Denoise that remembers, on the device, when each sample first was not finite.

    Args:
        denoise: that is watched. Its x0 is seen before any clamping, which would make an image of
            an infinity.
    """

    def __init__(self, denoise: Denoise) -> None:
        self._denoise = denoise
        self._since: Tensor | None = None  # (B,) times; nan while all is well

    def __call__(self, x_t: Tensor, t: Tensor) -> Denoised:
        """As `denoise`."""
        seen = self._denoise(x_t, t)
        bad = ~seen.x0.isfinite().flatten(1).all(1)
        since = torch.full_like(t, torch.nan) if self._since is None else self._since
        self._since = torch.where(bad & since.isnan(), t, since)
        return seen

    def refuse_non_finite(self, x0: Tensor, seeds: Sequence[int], step: int | None) -> None:
        """Raise NonFiniteSamples if a sample is not finite, or was not on the way.

        Args:
            x0: (B, C, H, W) what the solver returned.
            seeds: of the samples.
            step: optimizer steps that the weights were trained for; None where not known.
        """
        assert self._since is not None
        bad = ~self._since.isnan() | ~x0.isfinite().flatten(1).all(1)
        if bad.any():
            chosen = [seed for seed, is_bad in zip(seeds, bad.tolist(), strict=True) if is_bad]
            first = self._since[bad].nan_to_num(-torch.inf).max().item()
            where = f"t = {first:g}" if first > -torch.inf else "the last step"
            raise NonFiniteSamples(chosen, step, where)


def steps_of_fit(module: LightningModule) -> int | None:
    """Optimizer steps behind the weights; None outside of a fit, where a Trainer counts from 0."""
    trainer = module._trainer
    fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
    return module.global_step if fitting else None
