"""Group norm + SiLU on a GPU: ways to compute it, beside the time of reading and writing alone.

    python tests/benchmarks/gpu/norms.py [out.jsonl]

Prints a row as soon as it is measured, under a minute in all: device time of the forward pass, and
of forward and backward, in ms. table.py reads the rows of the first shape. Kernels run from a CUDA
graph over several sets of tensors, so that neither the host nor the caches hide anything. Without
a GPU it runs the same code on small tensors, for a check of the script (TRITON_INTERPRET=1).
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_diffusion.networks import fused_norm
from lit_diffusion.networks import fused_norm_triton as kernels
from lit_diffusion.networks.fused_norm import separate_group_norm_silu
from lit_diffusion.networks.unet import ResBlock

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(128, 256, 32, 32), (128, 256, 16, 16), (128, 128, 32, 32), (128, 512, 8, 8)]
if not GPU:
    SHAPES = [(2, 64, 4, 4)]
BLOCKS = [(32, 4096, 8), (32, 2048, 8), (64, 4096, 8), (32, 4096, 16)]
"""Channels and elements of a tile, and warps, of the Triton kernels."""
OPTIONS = (32, 1e-5, True)
SEPARATE = "separate operations of torch, in float32"
START = time.perf_counter()


def bf16_group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, shift: Tensor | None, *_: object
) -> Tensor:
    """torch's group norm of bfloat16 tensors, which is contiguous on CUDA; then SiLU."""
    h = F.group_norm(x, 32, weight.to(x.dtype), bias.to(x.dtype), 1e-5)
    if not x.is_contiguous():
        h = h.contiguous(memory_format=torch.channels_last)
    if scale is not None:
        h = torch.addcmul(shift[:, :, None, None], h, 1 + scale[:, :, None, None])
    return F.silu(h)


def inputs(shape: tuple[int, ...], channels_last: bool, with_scale: bool) -> tuple[list, Tensor]:
    """Arguments of the operation, and the gradient of its output."""
    x, dy = torch.randn(2, *shape, device=DEVICE).bfloat16()
    if channels_last:
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    weight, bias = torch.randn(2, shape[1], device=DEVICE)
    scale_shift = [None, None]
    if with_scale:
        scale_shift = list(torch.randn(2, *shape[:2], device=DEVICE).bfloat16())
    tensors = [x, weight, bias, *scale_shift, None]
    return [t if t is None else t.requires_grad_() for t in tensors], dy


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


def measure(
    operation: Callable[..., Tensor], tensors: list[tuple[list, Tensor]], with_forward: bool = True
) -> dict:
    """Forward without a graph, and forward + backward, over sets of tensors."""

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return operation(*tensors[i][0], *OPTIONS)

    def both(i: int) -> object:
        arguments, dy = tensors[i]
        y = operation(*arguments, *OPTIONS)
        return torch.autograd.grad(y, [t for t in arguments if t is not None], dy)

    begin = time.perf_counter()
    row = {}
    calls = {"forward_ms": forward, "both_ms": both}
    for name, call in calls.items():
        if name == "forward_ms" and not with_forward:
            continue
        side = torch.cuda.Stream() if GPU else None
        if side:  # as capture asks for
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call(0)
            torch.cuda.current_stream().wait_stream(side)
        row[name] = milliseconds(call, len(tensors))
    y = operation(*tensors[0][0], *OPTIONS)
    row["keeps_layout"] = y.stride() == tensors[0][0][0].stride()
    return row | {"seconds": time.perf_counter() - begin}


def report(results: Path | None, row: dict) -> None:
    """Print and append a row."""
    row["at"] = time.perf_counter() - START
    print(
        f"{row['at']:5.1f}s {row['section']:24} {row['variant']:58} "
        f"forward {row.get('forward_ms', 0):.4f}  both {row['both_ms']:.4f} ms  "
        f"{row.get('keeps_layout', '')!s:5} took {row.get('seconds', 0):.1f} s",
        flush=True,
    )
    if results:
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def triton(channels: int, elements: int, warps: int, *arguments: object) -> Tensor:
    """The Triton kernels with other sizes of tiles."""
    blocks = (channels, elements, warps)
    if blocks != (kernels.CHANNELS, kernels.ELEMENTS, kernels.NUM_WARPS):
        kernels.CHANNELS, kernels.ELEMENTS, kernels.NUM_WARPS = blocks
        kernels._blocks.cache_clear()
    return kernels.GroupNormSiLU.apply(*arguments)


def variants(shape: tuple[int, ...], channels_last: bool) -> dict[str, tuple[Callable, bool]]:
    """Operations by name, and whether they get scale and shift."""
    rows: dict[str, tuple[Callable, bool]] = {}
    for blocks in BLOCKS[
        : 4 if shape == SHAPES[0] and channels_last else 2 if channels_last else 1
    ]:
        tiles = "" if blocks == BLOCKS[0] else f", tiles {blocks}"
        rows[f"our Triton kernel{tiles}"] = partial(triton, *blocks), False
    rows[SEPARATE] = separate_group_norm_silu, False
    rows["torch's group norm, in bfloat16"] = bf16_group_norm, False
    if shape == SHAPES[0]:
        rows["our Triton kernel, scale and shift"] = partial(triton, *BLOCKS[0]), True
        rows[f"{SEPARATE}, scale and shift"] = separate_group_norm_silu, True
    return rows


def res_block(shape: tuple[int, ...], compiled: bool, with_kernels: bool) -> dict:
    """A ResBlock under bf16 autocast in channels_last, with the Triton kernels or without."""
    has_kernels = fused_norm._has_kernels
    if not with_kernels:
        fused_norm._has_kernels = torch.compiler.assume_constant_result(lambda *_: False)
    channels = shape[1]
    block = ResBlock(channels, channels, 512, 0.0, scale_shift_norm=True, norm_groups=32)
    block = block.to(DEVICE, memory_format=torch.channels_last)
    if compiled:
        block.compile(fullgraph=True)
    x, dy = (t.bfloat16() for t in torch.randn(2, *shape, device=DEVICE))
    x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    emb, weights = torch.randn(shape[0], 512, device=DEVICE), list(block.parameters())

    def operation(x: Tensor, *_: object) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            return block(x, emb)

    row = measure(operation, [([x.requires_grad_(), *weights], dy)], with_forward=False)
    fused_norm._has_kernels = has_kernels
    return row


def main() -> None:
    """All rows: the shapes, then a ResBlock, whose compilation takes longest."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    torch.manual_seed(0)
    print(torch.cuda.get_device_name() if GPU else "no GPU", torch.__version__)
    for shape, channels_last in [(s, layout) for s in SHAPES for layout in (True, False)]:
        section = "norms" if shape == SHAPES[0] else f"norms {'x'.join(map(str, shape))}"
        layout = "channels_last" if channels_last else "contiguous"
        elements = torch.Size(shape).numel()
        sets = max(1, min(8, 3 * 10**8 // (4 * elements))) if GPU else 1
        pairs = [torch.randn(2, *shape, device=DEVICE).bfloat16() for _ in range(sets)]
        copy = milliseconds(lambda i, pairs=pairs: pairs[i][0].copy_(pairs[i][1]), sets)
        floor = {"forward_ms": copy, "both_ms": 2.5 * copy}  # both move 5 tensors, a copy 2
        name = f"{layout}, copies of as many bytes"
        report(results, {"section": section, "variant": name, **floor})
        del pairs
        for name, (operation, with_scale) in variants(shape, channels_last).items():
            tensors = [inputs(shape, channels_last, with_scale) for _ in range(sets)]
            row = measure(operation, tensors)
            report(results, {"section": section, "variant": f"{layout}, {name}", **row})
    for name, compiled, with_kernels in (
        ("ResBlock, eager", False, True),
        ("ResBlock compiled, kernels", True, True),
        ("ResBlock compiled, inductor", True, False),
    ):
        row = res_block(SHAPES[0], compiled and GPU, with_kernels)
        report(results, {"section": "norms of a ResBlock", "variant": name, **row})


if __name__ == "__main__":
    main()
