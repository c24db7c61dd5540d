"""Group norm + SiLU on a GPU: ways to compute it, beside the time of reading and writing alone.

    python tests/benchmarks/gpu/norms.py [out.jsonl]

Prints a row as soon as it is measured: device time of the forward pass, and of forward and
backward, in ms. Kernels run from a CUDA graph over several sets of tensors, so that neither the
host nor the caches hide anything. Without a GPU it runs the same code on small tensors, for a check
of the script (TRITON_INTERPRET=1).
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diffusion.networks import fused_norm_triton as kernels
from lit_diffusion.networks.fused_norm import separate_group_norm_silu

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE = (128, 256, 32, 32) if GPU else (2, 64, 4, 4)
SETS = 2 if GPU else 1
OPTIONS = (32, 1e-5, True)


def bf16_group_norm(x: Tensor, weight: Tensor, bias: Tensor, *_: object) -> Tensor:
    """torch's group norm of bfloat16 tensors, which is contiguous on CUDA; then SiLU."""
    h = F.group_norm(x, 32, weight.to(x.dtype), bias.to(x.dtype), 1e-5)
    if not x.is_contiguous():
        h = h.contiguous(memory_format=torch.channels_last)
    return F.silu(h)


OPERATIONS = {
    "our Triton kernel": lambda *arguments: kernels.GroupNormSiLU.apply(*arguments),
    "separate operations of torch, in float32": separate_group_norm_silu,
    "torch's group norm, in bfloat16": bf16_group_norm,
}


def inputs(layout: torch.memory_format) -> tuple[list, Tensor]:
    """Arguments of an operation, without scale, shift and bias, and the gradient of its output."""
    x, dy = (t.to(memory_format=layout) for t in torch.randn(2, *SHAPE, device=DEVICE).bfloat16())
    weight, bias = torch.randn(2, SHAPE[1], device=DEVICE)
    return [*(t.requires_grad_() for t in (x, weight, bias)), None, None, None], dy


def milliseconds(call: Callable[[int], object], sets: int) -> float:
    """Median time of call(i), over sets of tensors i, from a CUDA graph."""
    for i in range(sets):
        call(i)
    if not GPU:
        start = time.perf_counter()
        call(0)
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / sets)
    return statistics.median(times)


def measure(operation: Callable[..., Tensor], tensors: list[tuple[list, Tensor]]) -> dict:
    """Forward without a graph, and forward + backward, over sets of tensors."""

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return operation(*tensors[i][0], *OPTIONS)

    def both(i: int) -> object:
        arguments, dy = tensors[i]
        y = operation(*arguments, *OPTIONS)
        return torch.autograd.grad(y, [t for t in arguments if t is not None], dy)

    row = {}
    for name, call in {"forward_ms": forward, "both_ms": both}.items():
        if GPU:  # as capture asks for
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call(0)
            torch.cuda.current_stream().wait_stream(side)
        row[name] = milliseconds(call, len(tensors))
    y = operation(*tensors[0][0], *OPTIONS)
    return row | {"keeps_layout": y.stride() == tensors[0][0][0].stride()}


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if GPU else "no GPU", torch.__version__)

    def report(variant: str, row: dict) -> None:
        line = json.dumps({"section": "norms", "variant": variant, **row})
        print(line, flush=True)
        for path in sys.argv[1:]:
            with open(path, "a") as file:
                file.write(line + "\n")

    for layout, name in (
        (torch.channels_last, "channels_last"),
        (torch.contiguous_format, "contiguous"),
    ):
        pairs = [torch.randn(2, *SHAPE, device=DEVICE).bfloat16() for _ in range(SETS)]
        copy = milliseconds(lambda i, pairs=pairs: pairs[i][0].copy_(pairs[i][1]), SETS)
        both = 2.5 * copy  # both passes move 5 tensors, a copy 2
        report(f"{name}, copies of as many bytes", {"forward_ms": copy, "both_ms": both})
        for operation, run in OPERATIONS.items():
            report(f"{name}, {operation}", measure(run, [inputs(layout) for _ in range(SETS)]))


if __name__ == "__main__":
    main()
