"""bfloat16 arithmetic that runs on every machine."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def portable_bfloat16() -> Iterator[None]:
    """Keep oneDNN out: some virtual machines announce AMX tiles and then die of them (SIGILL)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
