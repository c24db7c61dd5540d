"""Token routing: in training, random tokens skip some blocks of a transformer, to save compute.

In each training step, every image has its own random set of routed tokens. They skip the blocks
from `start` to `end - 1`, and return to their places before block `end`. The other tokens go
through all blocks. Only tokens of patches are routed, not tokens of conditions. In evaluation mode,
no token is routed.

Source: Krause et al. 2025 (TREAD, arXiv 2501.04765).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRouting:
    """Which share of the tokens skips which blocks in training.

    The random numbers come from torch's global generator. The loss covers all tokens.

    An auxiliary loss, such as `auxiliary_losses.Dispersive`, may use the features of a block that
    routed tokens skip. The loss then gets only the other tokens, in their original order.

    Args:
        fraction: share of an image's patch tokens that is routed, in [0, 1). The number of routed
            tokens is rounded, and must be less than the number of patches. The authors use 0.5.
        start: index of the first block that routed tokens skip. In the authors' code it is 2,
            with 12 blocks.
        end: index of the first block that gets all tokens again, less than the depth of the
            network. In the authors' code it is 9, with 12 blocks.

    Raises:
        ValueError: if fraction, start or end is out of range.

    Example:
        >>> from lit_diffusion.networks.dit import DiT
        >>> routing = TokenRouting(fraction=0.5, start=1, end=3)
        >>> network = DiT(8, 1, 1, depth=4, width=32, num_heads=2, token_routing=routing)
        >>> network(torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])).shape
        torch.Size([2, 1, 8, 8])
    """

    fraction: float
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction must be at least 0 and below 1, got {self.fraction}.")
        if not 0 <= self.start < self.end:
            raise ValueError(f"0 <= start < end must hold, got {self.start} and {self.end}.")

    def check_network(self, depth: int, num_patches: int) -> None:
        """Raise ValueError if a network has no block `end`, or if all its patches are routed."""
        if self.end >= depth:
            raise ValueError(
                f"end must be below the depth {depth}, so that a block gets all tokens again, got "
                f"end={self.end}."
            )
        if self.num_routed(num_patches) == num_patches:
            raise ValueError(
                f"at least one of the {num_patches} patches must not be routed, but "
                f"fraction={self.fraction} is rounded to all of them; use at most "
                f"{1 - 1 / num_patches}."
            )

    def num_routed(self, num_patches: int) -> int:
        """Return the number of patches of an image that are routed."""
        return round(self.fraction * num_patches)


class Route:
    """The routed tokens of one forward pass.

    Args:
        routing: which tokens skip which blocks. None routes no token.
        num_patches: number N of patch tokens, which come first in the sequence. The E tokens after
            the patch tokens are not routed.

    Attributes:
        kept: (B, K) int64 patches that are not routed, in ascending order. None outside the blocks
            that routed tokens skip.

    Example:
        >>> route = Route(TokenRouting(fraction=0.5, start=0, end=1), num_patches=4)
        >>> x = torch.randn(2, 5, 8)
        >>> fewer = route.before_block(0, x)
        >>> fewer.shape
        torch.Size([2, 3, 8])
        >>> torch.equal(route.before_block(1, fewer), x)
        True
    """

    def __init__(self, routing: TokenRouting | None, num_patches: int) -> None:
        self.routing, self.num_patches = routing, num_patches
        self.kept: Tensor | None = None

    def before_block(self, i: int, x: Tensor) -> Tensor:
        """Take the routed tokens out before block `start`, and put them back before block `end`.

        Args:
            i: index of the block that x enters next.
            x: (B, N + E, D), or (B, K + E, D) while tokens are routed. E may differ from block to
                block.

        Returns:
            (B, K + E, D) if `start` <= i < `end`, else (B, N + E, D). Of the N patch tokens, K are
            not routed.
        """
        if self.routing is not None and i == self.routing.start:
            num_routed = self.routing.num_routed(self.num_patches)
            order = torch.rand(len(x), self.num_patches, device=x.device).argsort(dim=1)
            self.kept = order[:, num_routed:].sort(dim=1).values
            self.patches, others = x[:, : self.num_patches], x[:, self.num_patches :]
            return torch.cat([self.patches.gather(1, self._index(x)), others], dim=1)
        if self.kept is not None and self.routing is not None and i == self.routing.end:
            patches, others = x[:, : self.kept.shape[1]], x[:, self.kept.shape[1] :]
            x = torch.cat([self.patches.scatter(1, self._index(x), patches), others], dim=1)
            self.kept = None
        return x

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Take the routed tokens out of a mask (B, N + E), which is True for all patches."""
        if mask is None or self.kept is None:
            return mask
        return mask[:, self.num_patches - self.kept.shape[1] :]

    def rope(self, cos_sin: Tensor) -> Tensor:
        """Take the routed tokens out of rotary positions.

        Args:
            cos_sin: (2, N + E, d / 2) cosines and sines of all tokens.

        Returns:
            (2, B, K + E, d / 2) while tokens are routed, else `cos_sin`.
        """
        if self.kept is None:
            return cos_sin
        patches, others = cos_sin[:, self.kept], cos_sin[:, None, self.num_patches :]
        return torch.cat([patches, others.expand(-1, len(self.kept), -1, -1)], dim=2)

    def _index(self, x: Tensor) -> Tensor:
        """Indices (B, K, D) of the features of the tokens that are not routed."""
        assert self.kept is not None
        return self.kept[:, :, None].expand(-1, -1, x.shape[2])
