"""Milliseconds per forward + backward of digits-size U-Nets: python tests/benchmarks/bench_unet.py

Images are 1 x 8 x 8. Prints a line per shape and memory format: wall time, and processor time,
which says more on a busy machine (with --threads 1).
"""

import argparse
import statistics
import time

import torch

from lit_diffusion.networks.unet import UNet

BASE = {"model_channels": 32, "channel_mult": (1, 2), "num_res_blocks": 1, "norm_groups": 8}
SHAPES = {
    "32 x (1, 2), 1 block": BASE,
    "same, 32 groups": BASE | {"norm_groups": 32},
    "same, resblock_updown": BASE | {"resblock_updown": True},
    "same, attention at 8x8": BASE | {"attention_downsample": (1, 2)},
    "32 x (1, 2), 2 blocks": BASE | {"num_res_blocks": 2},
    "32 x (1, 2, 2), 1 block": BASE | {"channel_mult": (1, 2, 2)},
    "32 x (1, 2, 4), 1 block": BASE | {"channel_mult": (1, 2, 4)},
    "48 x (1, 2), 1 block": BASE | {"model_channels": 48},
    "64 x (1, 2), 1 block": BASE | {"model_channels": 64},
}


def time_steps(
    network: UNet, memory_format: torch.memory_format, batch: int, steps: int
) -> tuple[list[float], list[float]]:
    """Wall and processor milliseconds of each step, after three to warm up."""
    network = network.to(memory_format=memory_format)
    x = torch.randn(batch, 1, 8, 8).to(memory_format=memory_format)
    noise_label, labels = 1000 * torch.rand(batch), torch.randint(-1, 10, (batch,))
    wall, processor = [], []
    for _ in range(3 + steps):
        start = time.perf_counter(), time.process_time()
        network(x, noise_label, labels).square().mean().backward()
        wall.append(1000 * (time.perf_counter() - start[0]))
        processor.append(1000 * (time.process_time() - start[1]))
        network.zero_grad()
    return wall[3:], processor[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, batch {options.batch}")
    print(f"{'shape':24} {'parameters':>10}  {'format':13} {'median ms':>9} {'CPU ms':>6}")
    for name, shape in SHAPES.items():
        for memory_format in (torch.channels_last, torch.contiguous_format):
            network = UNet(1, 1, num_classes=10, **shape)
            wall, processor = time_steps(network, memory_format, options.batch, options.steps)
            size = sum(parameter.numel() for parameter in network.parameters())
            layout = str(memory_format).removeprefix("torch.").removesuffix("_format")
            figures = f"{statistics.median(wall):9.0f} {min(processor):6.0f}"
            print(f"{name:24} {size:10,}  {layout:13} {figures}")


if __name__ == "__main__":
    main()
