"""Which tensors hold NaN or infinity."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_diffusion.sharding import local, on_any_rank


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """(N,) bool: whether each tensor holds a value that is not finite. No GPU is waited for.

    Empty tensors are finite; of a sharded one this process's part counts, of a sparse one its
    values.
    """
    values = [t.coalesce().values() if t.is_sparse else local(t) for t in tensors]
    values = [value if value.numel() else value.new_zeros(1) for value in values]
    if all(value.device.type == "cpu" for value in values):
        # A tenth of the time; squares may overflow, so what it finds is looked at again.
        found = _infinite_norms(values, 2.0)
        return _infinite_norms(values, math.inf) if found.any() else found
    return _infinite_norms(values, math.inf)


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Index of the first tensor with a value that is not finite; costs one host synchronisation.

    Collective where tensors are split over ranks: each of these gets the same answer.
    """
    bad = on_any_rank(nonfinite(tensors), tensors).cpu() if tensors else torch.zeros(0)
    return int(bad.nonzero()[0]) if bad.any() else None


def _infinite_norms(values: Sequence[Tensor], order: float) -> Tensor:
    norms = torch._foreach_norm(list(values), order)
    return ~torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite()
