"""What must be at hand to undo an update that is judged later, without waiting for a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KeptWeights:
    """A copy of weights, on their device.

    Example:
        >>> weight, kept = torch.ones(2), KeptWeights()
        >>> kept.keep([weight])
        >>> weight.fill_(torch.nan)
        tensor([nan, nan])
        >>> kept.put_back()
        >>> weight
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self, params: Sequence[Tensor]) -> None:
        """Copy these; memory is taken anew only where they are others than before."""
        if [id(p) for p in params] != [id(p) for p in self._params]:
            self._params = list(params)
            self._copies = [param.detach().clone() for param in params]
        elif self._params:
            torch._foreach_copy_(self._copies, self._params)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the weights the values that they had when they were copied."""
        if self._params:
            torch._foreach_copy_(self._params, self._copies)


class Reading:
    """Numbers on their way from a device to the host.

    Args:
        numbers: of any device; the copy begins at once.

    Example:
        >>> Reading(torch.tensor([1.0, 0.0])).get()
        [1.0, 0.0]
    """

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._copied = numbers, None
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def get(self) -> list[float]:
        """The numbers; waits for the device to have come to them, and no further."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._host.tolist()
        return found
