"""What images are conditioned on: class labels here; tokens or embeddings by a class of your own.

A condition has a row per image, and says in itself where there is none, so that training can drop
it and guidance can leave it out. The network alone knows what it means.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Condition, Conditioning, by_part
from lit_diffusion.seeding import classes_of


@dataclass(frozen=True)
class ClassLabels:
    """Classes 0, ..., num_classes - 1, as (B,) int64; -1 is none.

    Args:
        num_classes: how many.

    Example:
        >>> labels = ClassLabels(10).for_seeds([3, 12])
        >>> labels.tolist(), ClassLabels(10).dropped(labels, torch.tensor([False, True])).tolist()
        ([3, 2], [3, -1])
    """

    num_classes: int

    def dropped(self, condition: Condition, drop: Tensor, /) -> Condition:
        """-1 where `drop` is true."""
        return by_part(lambda labels: labels.masked_fill(drop, -1), condition)

    def null(self, like: Condition, /) -> Condition:
        """-1 everywhere."""
        return by_part(lambda labels: torch.full_like(labels, -1), like)

    def for_seeds(self, seeds: Sequence[int], /) -> Condition:
        """Seed modulo `num_classes`."""
        return torch.tensor(classes_of(seeds, self.num_classes))

    def check(self, condition: Condition, num: int, /) -> None:
        """Raise ValueError where these are not `num` labels, before a GPU could die of one."""
        if not isinstance(condition, Tensor):
            raise ValueError(f"labels must be one tensor ({num},), got {type(condition).__name__}.")
        if condition.shape != (num,) or condition.dtype not in (torch.int64, torch.int32):
            got = f"{tuple(condition.shape)} of {condition.dtype}"
            raise ValueError(f"labels must be one per image, ({num},), got {got}; use int64.")
        if bool(((condition < -1) | (condition >= self.num_classes)).any()):
            last = self.num_classes - 1
            known = f"0..{last} or -1" if self.num_classes else "-1, without num_classes"
            found = sorted(set(condition.tolist()))[:10]
            raise ValueError(f"labels must be {known}, got {found}.")


def condition_for(
    seeds: Sequence[int], labels: Condition, conditioning: Conditioning | None
) -> Condition:
    """What to generate these samples from, checked.

    Labels None leave it to the seeds; a module without conditioning has none, as -1 may say too.

    Example:
        >>> condition_for([3], torch.tensor([-1]), None) is None
        True
    """
    if not len(seeds):
        raise ValueError("generate needs at least one seed, got none.")
    if labels is None:
        return None if conditioning is None else conditioning.for_seeds(seeds)
    (conditioning or ClassLabels(0)).check(labels, len(seeds))
    return None if conditioning is None else labels
