"""Training steps on a CPU, ours beside those of others, as tables and JSON lines.

    python tests/benchmarks/cpu_steps.py [digits] [cifar10] --out FILE [--peers PEERS]

A step is forward, backward, optimizer and average of the weights, in float32 on one thread. All
variants of a network are in one process and take turns, step by step. Times are CPU times of the
process, and ratios are of steps of one turn. PEERS holds a clone of openai/improved-diffusion (as
`improved`); without it, only diffusers is beside ours. --compile measures compiled networks, which
take minutes to compile; --fused has the fused Adam in all variants.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import ours
import peers
import torch
from ceilings import versions
from measure import Rows
from table import table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
KINDS = {
    "convolution": ("convolution",),
    "matmul and attention": ("mm", "attention"),
    "norms": ("group_norm",),
    "SiLU": ("silu",),
}
"""Kinds of operations by words in their names."""
SPECS: dict[str, dict[str, Any]] = {
    "digits": {
        "ours": "digits",
        "images": (64, 1, 8, 8),
        "diffusers": {"tiny": True, "in_channels": 1, "out_channels": 1, "dropout": 0.0}
        | {"norm_num_groups": 8, "num_class_embeds": 10},
        "improved": {"model_channels": 32, "out_channels": 1, "num_res_blocks": 1}
        | {"attention_resolutions": (2,), "channel_mult": (1, 2), "num_classes": 10}
        | {"diffusion": {"steps": 1000}},
    },
    "cifar10": {
        "ours": "cifar10-improved",
        "images": (4, 3, 32, 32),
        "diffusers": {"tiny": False},
        "improved": {"model_channels": 128, "out_channels": 6, "num_res_blocks": 3}
        | {"attention_resolutions": (2, 4), "channel_mult": (1, 2, 2, 2), "dropout": 0.3}
        | {"diffusion": {"steps": 4000, "learn_sigma": True, "rescale_learned_sigmas": True}},
    },
}
"""The networks: a config of ours, the shape of a batch, and sizes in other libraries."""


class TimeOperations(TorchDispatchMode):
    """Adds up the CPU time inside of torch's operations by kind, in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.milliseconds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.process_time() - start
        for kind, words in KINDS.items():
            if any(word in name for word in words):
                self.milliseconds[kind] += 1000 * seconds
        return result


class Variant:
    """Training steps of a network, and the CPU time of each in milliseconds."""

    def __init__(self, network: nn.Module, loss: Callable[[], Tensor], fused: bool) -> None:
        self.training, self.loss = ours.Training(network, fused=fused), loss
        self.parameters = sum(p.numel() for p in self.training.parameters)
        self.milliseconds: list[float] = []
        self.update_milliseconds: list[float] = []

    def time_step(self) -> None:
        start = time.process_time()
        self.loss().backward()
        after_backward = time.process_time()
        self.training.update()
        end = time.process_time()
        self.milliseconds.append(1000 * (end - start))
        self.update_milliseconds.append(1000 * (end - after_backward))

    def kinds(self, num: int) -> dict[str, float]:
        """Milliseconds of a step by kind; "rest" has all else, such as Python and autograd."""
        kinds = {"optimizer and average": median(self.update_milliseconds)}
        with TimeOperations() as times:
            for _ in range(num):
                self.loss().backward()
        self.training.optimizer.zero_grad()
        kinds |= {kind: times.milliseconds[kind] / num for kind in KINDS}
        return kinds | {"rest": median(self.milliseconds) - sum(kinds.values())}


def diffusers_loss(
    batch: tuple[Tensor, Tensor | None], memory_format: torch.memory_format, **sizes: Any
) -> tuple[nn.Module, Callable[[], Tensor]]:
    network = peers.diffusers_unet(**sizes).to(memory_format=memory_format)

    def call(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        output: Tensor = network(x.contiguous(memory_format=memory_format), t, labels).sample
        return output

    return network, peers.noise_loss(call, *batch)


def build_variants(name: str, options: argparse.Namespace) -> dict[str, Variant]:
    """All variants of a network by name; compiled code chooses its format itself."""
    spec = SPECS[name]
    images = torch.randint(0, 256, spec["images"], dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),)) if name == "digits" else None
    variants = {}
    compiled = ("contiguous",) if options.compile else ()
    for how, layouts in {"eager": (*FORMATS,), "compiled": compiled}.items():
        for layout in layouts:
            module = ours.build(spec["ours"], channels_last=layout == "channels_last")
            loss = partial(ours.loss_of, module, images, labels)
            theirs = diffusers_loss((images, labels), FORMATS[layout], **spec["diffusers"])
            if how == "compiled":
                module.compile_network("default")
                theirs[0].compile(dynamic=False)
            for library, pair in {"ours": (module.network, loss), "diffusers": theirs}.items():
                variants[f"{library}, {layout}, {how}"] = Variant(*pair, options.fused)
    if options.peers:
        common = {"num_heads": 4, "use_scale_shift_norm": True}
        pair = peers.improved_diffusion_loss(images, labels, **common, **spec["improved"])
        variants["improved-diffusion, contiguous, eager"] = Variant(*pair, options.fused)
    return variants


def measure(name: str, options: argparse.Namespace, rows: Rows) -> None:
    """Write a row for each variant; its ratio is to our fastest, eager or compiled as itself."""
    variants = build_variants(name, options)
    for variant in variants.values():
        variant.time_step()
        variant.time_step()
        variant.milliseconds, variant.update_milliseconds = [], []
    for _ in range(options.turns):
        for variant in variants.values():
            variant.time_step()
    for key, variant in variants.items():
        how = key.split(", ")[2]
        alike = [v for k, v in variants.items() if k.startswith("ours") and k.endswith(how)]
        best = min(alike, key=lambda v: median(v.milliseconds))
        turns = zip(variant.milliseconds, best.milliseconds, strict=True)
        ratios = [theirs / fastest for theirs, fastest in turns]
        low, ratio, high = quantiles(ratios, method="inclusive")
        row = {"cpu_ms": median(variant.milliseconds), "ratio": ratio, "low": low, "high": high}
        row |= variant.kinds(2) if how == "eager" else {}  # compiled code has no operations
        row = {name: float(f"{value:.4g}") for name, value in row.items()}
        row |= {"parameters": variant.parameters, "turns": options.turns, "fused": options.fused}
        rows.write(f"cpu-{name}", key, **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[*SPECS], metavar="NETWORK")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--commit", default="unknown", help="written into every row")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fused", action="store_true")
    arguments = parser.parse_args()
    if arguments.peers:
        os.environ["LIT_DIFFUSION_PEERS"] = str(arguments.peers.resolve())
    torch.set_num_threads(1)
    common = versions() | {"commit": arguments.commit, "date": date.today().isoformat()}
    for network_name in arguments.networks:
        measure(network_name, arguments, Rows(arguments.out, **common))
        print("\n".join(table(arguments.out, f"cpu-{network_name}")))
