"""Features of a network: the output of one of its blocks, recorded by a forward hook."""

from math import isqrt
from typing import Any

from torch import Tensor, nn


def find_block(network: nn.Module, name: str) -> nn.Module:
    """Return the block `name` of a network, such as "blocks.3" or "middle_block".

    Raises:
        ValueError: if the network has no block of this name.

    Example:
        >>> find_block(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "1")
        ReLU()
    """
    try:
        return network.get_submodule(name)
    except AttributeError as error:
        names = [name for name, _ in network.named_children()]
        raise ValueError(
            f"{type(network).__name__} has no block {name!r}; it has {', '.join(names)} "
            "and their blocks, such as blocks.3."
        ) from error


def feature_grid(output: Tensor, network: nn.Module) -> Tensor:
    """Arrange the output of a block in a grid of positions.

    Args:
        output: (B, D, h, w) feature map, or (B, L, D) tokens. Tokens of conditions, which the
            network puts before or after the tokens of the patches, are left out.
        network: network that contains the block. Its attribute `side` is the number of patches
            along one side of the image, and its attribute `num_prefix` is the number of tokens
            before the patches. Without `side`, all tokens are patches.

    Returns:
        (B, h, w, D) features.

    Raises:
        ValueError: if the output does not have one token for each patch, as in a block that some
            tokens skip (see `networks.routing`).

    Example:
        >>> from lit_diffusion.networks.dit import DiT
        >>> network = DiT(8, 1, 1, patch_size=2, width=32, depth=1, num_heads=2)
        >>> feature_grid(torch.randn(5, 16, 32), network).shape
        torch.Size([5, 4, 4, 32])
    """
    if output.ndim == 4:
        return output.movedim(1, -1)
    side, tokens = getattr(network, "side", None), output
    if side is None:
        side = isqrt(output.shape[1])
    else:
        first = getattr(network, "num_prefix", 0)
        tokens = output[:, first : first + side**2]
    if tokens.shape[1] != side**2:
        raise ValueError(
            f"the block must output a token for each of the {side} x {side} patches, got "
            f"{tokens.shape[1]} tokens; choose a block that processes all tokens."
        )
    return tokens.reshape(len(tokens), side, side, -1)


class BlockFeatures:
    """Records the output of a block in each forward pass in training mode.

    The hook is registered before the network is compiled, so it also works in a compiled network.

    Args:
        block: name of the block in the network, such as "blocks.3" or "middle_block".

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> features = BlockFeatures("0")
        >>> features.attach(network)
        >>> _ = network(torch.ones(1, 2))
        >>> features.take().shape
        torch.Size([1, 3])
    """

    def __init__(self, block: str) -> None:
        self.block = block
        self._output: Tensor | None = None

    def attach(self, network: nn.Module) -> None:
        """Register the forward hook.

        Raises:
            ValueError: if the network has no block of this name.
        """
        find_block(network, self.block).register_forward_hook(self._record)

    def _record(self, block: nn.Module, inputs: Any, output: Tensor) -> None:
        if block.training:
            self._output = output

    def take(self) -> Tensor:
        """Return the output of the last forward pass in training mode, and forget it.

        Returns:
            (B, N, D) tokens or (B, C, H, W) feature maps, through which gradients can flow.

        Raises:
            RuntimeError: if there was no forward pass since the last call.
        """
        if self._output is None:
            raise RuntimeError(f"block {self.block!r} has not run in training mode.")
        output, self._output = self._output, None
        return output
