"""What the device does at most: matrix products, convolutions, copies."""

import platform
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import lightning
import torch
from measure import device, synchronize
from turns import Body, Channel


def timed(run: Callable[[], Any], repeats: int = 20, warm_up: int = 3) -> float:
    """Median milliseconds of a call, on the device where there is one."""
    for _ in range(warm_up):
        run()
    synchronize()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - begin))
    return median(times)


def ceilings(tiny: bool) -> dict[str, Body]:
    def body(channel: Channel) -> None:
        channel.reply()
        channel.request()
        channel.reply(dict(measured(tiny)))

    return {"ceilings": body}


def versions() -> dict[str, str]:
    import diffusers

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
    }


def measured(tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    tiny = tiny or not torch.cuda.is_available()
    yield "versions", versions()
    size = 256 if tiny else 8192
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
        ms = timed(lambda a=a, b=b: a @ b)
        yield f"matmul, {name}", {"device_ms": ms, "tflops": 2 * size**3 / ms / 1e9}
    x = torch.randn(2**20 if tiny else 2**29, device=device())
    y = torch.empty_like(x)
    ms = timed(lambda: y.copy_(x))
    yield "copy", {"device_ms": ms, "gb_per_s": 2 * 4 * x.numel() / ms / 1e6}
    batch, channels, side = (2, 32, 8) if tiny else (128, 256, 32)
    flops = 3 * 2 * batch * side**2 * channels**2 * 9
    for layout in (torch.channels_last, torch.contiguous_format):
        convolution = torch.nn.Conv2d(channels, channels, 3, padding=1)
        convolution.to(device(), torch.bfloat16, memory_format=layout)
        x = torch.randn(batch, channels, side, side, device=device(), dtype=torch.bfloat16)
        x = x.to(memory_format=layout).requires_grad_()
        gradient = torch.randn_like(x)
        ms = timed(lambda conv=convolution, x=x, g=gradient: conv(x).backward(g))
        name = str(layout).removeprefix("torch.")
        yield f"convolution, {name}", {"device_ms": ms, "tflops": flops / ms / 1e9}
