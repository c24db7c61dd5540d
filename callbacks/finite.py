"""Which tensors hold NaN or infinity."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_diffusion.sharding import local, on_any_rank


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """(N,) bool: whether each tensor holds a value that is not finite. No GPU is waited for.

    Args:
        tensors: one or more, of any shapes; empty ones are finite. Of a sharded one, this process's
            part counts, of a sparse one its values.

    Example:
        >>> nonfinite([torch.ones(2), torch.tensor([1.0, torch.nan]), torch.ones(0)])
        tensor([False,  True, False])
    """
    values = [_values(tensor) for tensor in tensors]
    norms = torch._foreach_norm([v if v.numel() else v.new_zeros(1) for v in values], math.inf)
    return ~torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite()


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Index of the first tensor with a value that is not finite; costs one host synchronisation.

    Collective where tensors are split over ranks: each of these gets the same answer.

    Example:
        >>> first_nonfinite([torch.ones(2), torch.tensor([1.0, torch.nan])])
        1
    """
    bad = on_any_rank(nonfinite(tensors), tensors).cpu() if tensors else torch.zeros(0)
    return int(bad.nonzero()[0]) if bad.any() else None


def _values(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return local(tensor)
