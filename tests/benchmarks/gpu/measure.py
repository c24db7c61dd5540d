"""Steps that are timed and profiled on the device, and rows of results."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from turns import Channel

KINDS = {
    "copies": r"nchwtonhwc|nhwctonchw|copy_kernel|bfloat16tofloat|memcpy|memset|catarray|transpose",
    "optimizer and EMA": r"multi_tensor|fusedoptimizer",
    "fused by inductor": r"^triton_",
    "matmul, convolution, attention": r"gemm|conv|xmma|cutlass|sm[89]0|nvjet|flash|fmha|cudnn"
    "|cublas|dgrad|wgrad|splitk",
    "norms": r"norm|moments|gammabeta|computeinternalgradients",
    "random numbers": r"random|dropout|distribution|philox",
    "reductions": r"reduce",
    "elementwise": r"elementwise|vectorized",
}
"""Kinds of kernels by their names, the first that fits; else "other"."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Rows:
    """A file of JSON lines, each written at once; a later row of the same variant replaces one."""

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self.common = path, common

    def write(self, section: str, variant: str, **values: Any) -> None:
        row = {"section": section, "variant": variant, **values, **self.common}
        line = json.dumps(row) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        print(line[:400].rstrip(), flush=True)


@dataclass
class Step:
    """What is timed: a call that works on so many images."""

    run: Callable[[], Any]
    images: int
    is_eager: bool = True  # whether its floating-point operations can be counted


class Steps:
    """Steps of one process, which share weights; they are timed when their turn comes."""

    def __init__(self, steps: dict[str, Step], counts_flops: bool = True) -> None:
        self.steps, self.counts_flops = steps, counts_flops

    def serve(self, channel: Channel) -> None:
        """Do each step once, say so, and answer requests for ever."""
        first_seconds = {name: self._first(step) for name, step in self.steps.items()}
        free_memory()
        channel.reply()
        while True:
            name, args = channel.request()
            try:
                channel.reply(first_seconds if name == "first" else getattr(self, name)(*args))
            except Exception:
                channel.reply_error()

    def _first(self, step: Step) -> float:
        """Seconds of the first step, that of its compilation included."""
        start = time.perf_counter()
        while not _fits(step.run):  # others may hold the memory for a moment
            free_memory()
            time.sleep(1)
        synchronize()
        return time.perf_counter() - start

    def time(self, name: str, seconds: float) -> dict[str, Any]:
        """Milliseconds of a step in a block of about so many seconds, and the last loss."""
        run = self.steps[name].run
        run()
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        num = min(max(int(seconds / (time.perf_counter() - start)), 3), 50) if seconds else 1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(num):
            loss = run()
        synchronize()
        wall_ms = 1000 * (time.perf_counter() - start) / num
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        free_memory()
        row = {"wall_ms": wall_ms, "images": self.steps[name].images, "peak_gib": peak}
        return row | ({"loss": float(loss.detach())} if isinstance(loss, torch.Tensor) else {})

    def profile(self, name: str, num: int = 3) -> dict[str, Any]:
        """Milliseconds of kernels a step, their number, and the milliseconds by kind."""
        run = self.steps[name].run
        if not torch.cuda.is_available():
            return {}  # there are no kernels
        run()
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(num):
                run()
            synchronize()
        free_memory()
        milliseconds, kernels = Counter[str](), 0
        longest = []
        for event in profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                milliseconds[kind_of(event.key)] += event.self_device_time_total / 1000 / num
                kernels += event.count
                longest.append((event.self_device_time_total / 1000 / num, event.count, event.key))
        return {
            "device_ms": sum(milliseconds.values()),
            "kernels": kernels / num,
            "kinds_ms": {kind: round(ms, 3) for kind, ms in milliseconds.most_common()},
            "longest": [
                f"{ms:.3f} ms, {count / num:.0f}: {key[:100]}"
                for ms, count, key in sorted(longest, reverse=True)[:15]
            ],
        }

    def flops(self, name: str) -> float | None:
        """Floating-point operations of a step's matrix products, convolutions and attention."""
        if not (self.counts_flops and self.steps[name].is_eager):
            return None
        with FlopCounterMode(display=False) as counter:
            self.steps[name].run()
        return counter.get_total_flops()


def _fits(run: Callable[[], Any]) -> bool:
    """Whether a step ran; False where the memory was not enough."""
    try:
        run()
    except Exception as error:
        if not re.search(r"out of memory|alloc_failed", str(error).lower()):
            raise
        return False
    return True


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name.

    Example:
        >>> kind_of("triton_poi_fused_silu_3"), kind_of("nchwToNhwcKernel")
        ('fused by inductor', 'copies')
    """
    low = kernel.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, low)), "other")
