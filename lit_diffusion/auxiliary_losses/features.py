"""Features of a network: the output of one of its blocks, recorded by a forward hook."""

from typing import Any

from torch import Tensor, nn


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
        try:
            block = network.get_submodule(self.block)
        except AttributeError as error:
            names = [name for name, _ in network.named_children()]
            raise ValueError(
                f"{type(network).__name__} has no block {self.block!r}; it has {', '.join(names)} "
                "and their blocks, such as blocks.3."
            ) from error
        block.register_forward_hook(self._record)

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
