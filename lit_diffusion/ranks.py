"""What processes that train together tell each other; alone, each is rank 0 of 1.

Everything but `place` is collective where there are several: every rank must call it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def place() -> tuple[int, int]:
    """Rank of this process and number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def from_first(ask: Callable[[], T]) -> T:
    """What `ask` gives, or raises, on the first process: on every process."""
    rank, world_size = place()
    if world_size == 1:
        return ask()
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = ask()
        except Exception as error:  # the others must not wait for an answer for ever
            answer[1] = error
    torch.distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]


def from_all(mine: T) -> list[T]:
    """What each process has, by rank."""
    _, world_size = place()
    found: list[Any] = [mine] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(found, mine)
    return found


def largest(mine: Tensor) -> Tensor:
    """The largest of all processes, element by element; written to `mine`. No GPU is waited for."""
    if place()[1] > 1:
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
    return mine
