"""Random numbers that depend only on a key, and not on previously drawn random numbers.

The key of a training batch is (seed of the run, rank, optimizer step, index of the batch).
Therefore, a resumed run draws the same numbers as an uninterrupted run, and each rank draws
different numbers. The key of a generated sample is the seed of the sample. Therefore, the noise of
a sample does not depend on batch size, device or number of ranks.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_WORD = 2**32  # torch's CPU generator uses only the low 32 bits of a seed
_INVERSE_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def fold(*key: int | str) -> int:
    """Hash a key to a 63-bit seed.

    Different keys give unrelated seeds. However, torch's CPU generator uses only the low 32 bits of
    a seed, so two keys may give the same random numbers. Among n keys, this happens for about
    `n**2 / 2**33` pairs, which is harmless in training. Generated samples must all differ, so
    `PerSampleNoise` uses a different hash, which is one-to-one for 32-bit seeds.

    Example:
        >>> fold("step", 0, 1) == fold("step", 0, 1), fold("step", 0, 1) == fold("step", 1, 0)
        (True, False)
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


RUN_SEED = "PL_GLOBAL_SEED"
"""Environment variable in which Lightning's `seed_everything` stores its seed."""


def run_seed() -> int | None:
    """Return the seed passed to Lightning's `seed_everything`; None if no seed was passed.

    Example:
        >>> from lightning.pytorch import seed_everything
        >>> seed_everything(7, verbose=False), run_seed()
        (7, 7)
        >>> del os.environ[RUN_SEED]
    """
    seed = os.environ.get(RUN_SEED)
    return None if seed is None else int(seed)


def seed_step(seed: int, rank: int, step: int, micro_batch: int) -> int:
    """Seed torch's global generators, on the CPU and on GPUs, for one training batch.

    Args:
        seed: seed of the run.
        rank: rank of the process.
        step: number of completed optimizer steps.
        micro_batch: number that differs between the batches of one optimizer step, such as the
            index of the batch in the epoch.

    Returns:
        The seed that was set. You may seed other generators with it.

    Example:
        >>> key, first = seed_step(seed=0, rank=0, step=100, micro_batch=0), torch.rand(1)
        >>> key == seed_step(seed=0, rank=0, step=100, micro_batch=0)
        True
        >>> torch.equal(torch.rand(1), first)
        True
    """
    key = fold("step", seed, rank, step, micro_batch)
    torch.default_generator.manual_seed(key)
    if _has_accelerator():  # skipped on a CPU, where torch.manual_seed takes 0.2 ms
        torch.manual_seed(key)
    return key


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


class PerSampleNoise:
    """Standard normal noise with one CPU generator per sample.

    The noise of sample i depends only on `seeds[i]`, the stream and the number of earlier draws,
    not on the other samples. In a stream, different seeds below `2**32` give different noise.
    Numbers are drawn on the CPU in float32 and then copied to the device, so all devices get the
    same noise.

    Args:
        seeds: one integer per sample.
        stream: what the noise is used for, such as "validation". For the same seed, two streams
            give different noise.

    Attributes:
        generators: one generator per sample. If you pass them to a diffusers pipeline, the pipeline
            draws the same noise as `generate` for these seeds.

    Example:
        >>> PerSampleNoise([3, 5]).draw((2, 2)).shape
        torch.Size([2, 2, 2])
        >>> torch.equal(PerSampleNoise([3, 5]).draw((4,))[1:], PerSampleNoise([5]).draw((4,)))
        True
    """

    def __init__(self, seeds: Sequence[int], stream: str = "sample") -> None:
        self.generators = [
            torch.Generator().manual_seed(_scramble(int(seed), fold(stream))) for seed in seeds
        ]

    def draw(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Draw float32 noise of this shape for each seed, and copy it to the device.

        If the device is a GPU, the host does not wait for it.
        """
        is_cuda = torch.device(device).type == "cuda"
        out = torch.empty((len(self.generators), *shape), dtype=torch.float32, pin_memory=is_cuda)
        for row, generator in zip(out, self.generators, strict=True):
            row.normal_(generator=generator)
        return out.to(device, non_blocking=is_cuda)

    def randn_like(self, x: Tensor) -> Tensor:
        """Draw noise with the shape, dtype and device of `x` (N, ...)."""
        return self.draw(x.shape[1:], x.device).to(x.dtype)


def _scramble(seed: int, offset: int) -> int:
    """Hash a 32-bit integer bijectively, with two rounds of xor-shift and multiplication."""
    x = (seed + offset) % _WORD
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # odd, so invertible
        x = (x ^ x >> 16) * factor % _WORD
    return x ^ x >> 16


def classes_of(seeds: Sequence[int], num_classes: int) -> list[int]:
    """Return the default class of each sample, `seed % num_classes`."""
    if seeds[10**8 :]:  # the len() of a range may overflow
        raise ValueError("num_samples, num or num_predict must be at most 100,000,000.")
    return [seed % num_classes for seed in seeds]


def index_uniforms(index: Tensor) -> Tensor:
    """Map indices (B,) int64 to u (B,) float64, so that consecutive indices cover [0, 1) evenly.

    The formula `u = frac(1/2 + index / golden_ratio)` is the additive recurrence with the lowest
    discrepancy. With this u, a validation set of any size covers all noise levels evenly.

    Example:
        >>> index_uniforms(torch.arange(3)).round(decimals=3).tolist()
        [0.5, 0.118, 0.736]
    """
    return (0.5 + index.double() * _INVERSE_GOLDEN_RATIO) % 1.0
