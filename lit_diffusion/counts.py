"""What is a count, and the count of cores."""

import os
from typing import Any


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 on that fits into 64 bits.

    Example:
        >>> is_count(3), is_count(True), is_count(-1), is_count(2**63)
        (True, False, False, False)
    """
    return type(value) is int and 0 <= value < 2**63


def usable_cores() -> int:
    """Cores that the affinity of this process allows."""
    mine = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if mine else os.cpu_count() or 1
