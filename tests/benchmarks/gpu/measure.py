"""Steps that are timed and profiled on the device, and rows of results."""

import fcntl
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    "norms": r"norm|moments|gammabeta|computeinternalgradients|_(forward|backward)_kernel",
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
    """A call that works on so many images, in its process; it is timed when its turn comes."""

    run: Callable[[], Any]
    images: int
    release: Callable[[], None] = lambda: None  # gives memory back that the next call allocates
    counts_flops: bool = False  # whether it is eager, with operations that torch can count

    def serve(self, channel: Channel) -> None:
        """Do the step once, say so, and answer requests for ever."""
        with _one_at_a_time() if self.counts_flops else nullcontext():
            start = time.perf_counter()
            while not _fits(self.run):  # others may hold the memory for a moment
                self.free_memory()
                time.sleep(random.uniform(0.5, 2))
            synchronize()
            first_seconds = time.perf_counter() - start
        self.free_memory()
        channel.reply(first_seconds)
        while True:
            name, args = channel.request()
            try:
                channel.reply(getattr(self, name)(*args))
            except Exception:
                channel.reply_error()
            self.free_memory()

    def free_memory(self) -> None:
        self.release()
        free_memory()

    def time(self, seconds: float) -> dict[str, Any]:
        """Milliseconds a step in a block of about so many seconds, and the last loss."""
        wall_ms, loss = _timed(self.run, 1)
        if wall_ms < 1000 * seconds:  # else a block is this one step
            _timed(self.run, 2)  # CUDA graphs are recorded again after `release`
            wall_ms, _ = _timed(self.run, 1)
            num = min(max(int(1000 * seconds / wall_ms), 3), 50)
            wall_ms, loss = _timed(self.run, num)
        row = {"wall_ms": wall_ms, "images": self.images, "peak_gib": None}
        if torch.cuda.is_available():
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return row | ({"loss": float(loss.detach())} if isinstance(loss, torch.Tensor) else {})

    def profile(self, num: int = 3) -> dict[str, Any]:
        """Milliseconds of kernels a step, their number, and the milliseconds by kind."""
        if not torch.cuda.is_available():
            return {}  # there are no kernels
        if num > 1:
            self.run()
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(num):
                self.run()
            synchronize()
        milliseconds, kernels = Counter[str](), 0
        for event in profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                milliseconds[kind_of(event.key)] += event.self_device_time_total / 1000 / num
                kernels += event.count
        return {
            "device_ms": sum(milliseconds.values()),
            "kernels": kernels / num,
            "kinds_ms": {kind: round(ms, 3) for kind, ms in milliseconds.most_common()},
        }

    def flops(self) -> float | None:
        """Floating-point operations of a step's matrix products, convolutions and attention."""
        if not self.counts_flops:
            return None
        with FlopCounterMode(display=False) as counter:
            self.run()
        return counter.get_total_flops()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for the other processes of this driver."""
    with Path(tempfile.gettempdir(), f"gpu-benchmark-{os.getppid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _timed(run: Callable[[], Any], num: int) -> tuple[float, Any]:
    """Milliseconds a step, and what the last of `num` steps returned."""
    start = time.perf_counter()
    for _ in range(num):
        result = run()
    synchronize()
    return 1000 * (time.perf_counter() - start) / num, result


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
    """The kind of a kernel by its name: "copies" of nchwToNhwcKernel."""
    low = kernel.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, low)), "other")
