"""Finding samples that are not finite, and when they became so, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_diffusion.protocols import Denoise, Denoised, NonFiniteSamples


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
        """Raise NonFiniteSamples if a row of x0 is not finite, or was not on the way."""
        assert self._since is not None
        bad = ~self._since.isnan() | ~x0.isfinite().flatten(1).all(1)
        if bad.any():
            chosen = [seed for seed, is_bad in zip(seeds, bad.tolist(), strict=True) if is_bad]
            first = self._since[bad].nan_to_num(-torch.inf).max().item()
            where = f"t = {first:g}" if first > -torch.inf else "the last step"
            raise NonFiniteSamples(chosen, step, where)
