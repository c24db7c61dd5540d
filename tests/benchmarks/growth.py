"""How the cost of training, sampling and loading grows, each beside the law that is expected.

    python tests/benchmarks/growth.py [SECTION ...] --out FILE
    python tests/benchmarks/growth_table.py FILE

Sections are batch, width, resolution, averages, sampling, ranks, files and paper. The first five
run on a GPU where there is one, in bf16-mixed and with larger sizes; on a CPU one thread trains in
float32. Rows are appended to FILE as JSON lines.
"""

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import ours
from measure import Rows, Step, device, free_memory, synchronize

from lit_diffusion.callbacks import EMA
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.modules.sharding import measure_step, shard_network
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet

ON_GPU = torch.cuda.is_available()
BATCHES = [16, 64, 256, 1024] if ON_GPU else [1, 4, 16, 64]
WIDTHS = [64, 128, 256, 512] if ON_GPU else [16, 32, 64, 128]
SIDES = [16, 32, 64, 128] if ON_GPU else [8, 16, 32, 64]
PROFILES, STEPS, RANKS = [1, 2, 4, 8], [5, 10, 20, 40], [1, 2, 4]
FILES = [1_000, 10_000, 100_000, 1_000_000]
BATCH, WIDTH, SIDE = (32, 128, 32) if ON_GPU else (8, 32, 16)
NETWORKS = ("U-Net", "DiT")
PARALLEL = ("U-Net, DDP", "DiT, DDP", "DiT, FSDP2")
MATMUL_TFLOPS, SHARE = 754, 0.56  # measured on one H200: docs/results/performance.md
NVLINK, NETWORK = 450e9, 50e9  # bytes/s into a GPU: from its node, from other nodes
NODE = 8  # GPUs
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
PAPER = (("dit-1b", "DiT-1B, FSDP2", 32), ("imagenet256-latents", "DiT-XL/2, DDP", 64))
"""Config, name, and images on a GPU."""


def build(kind: str, side: int = SIDE, width: int = WIDTH, **settings: Any) -> LightningModule:
    """The digits' module with a U-Net of so many channels, or a DiT 4 times as wide."""
    sizes: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "num_classes": 10}
    if kind == "DiT":
        sizes |= {"image_size": side, "width": 4 * width, "depth": 4, "num_heads": width // 16}
    else:
        sizes |= {"model_channels": width, "channel_mult": [1, 2], "num_res_blocks": 1}
        sizes |= {"attention_downsample": [2], "norm_groups": 8, "num_heads": 4}
    class_path = {"DiT": DiT, "U-Net": UNet}[kind]
    spec = {"class_path": f"{class_path.__module__}.{class_path.__name__}", "init_args": sizes}
    return ours.build("digits", image_shape=[1, side, side], network=spec, **settings)


def training(
    kind: str,
    batch: int = BATCH,
    parallel: Callable[[nn.Module], nn.Module] = lambda network: network,
    **sizes: int,
) -> Callable[[], Any]:
    """A training step with Adam and an average of the weights."""
    module = build(kind, **sizes)
    module.network = parallel(module.network)
    side = sizes.get("side", SIDE)
    images = torch.randint(256, (batch, 1, side, side), dtype=torch.uint8, device=device())
    labels = torch.randint(10, (batch,), device=device())
    state = ours.Training(module.network)
    return ours.training_step(state, lambda: ours.loss_of(module, images, labels), mixed=ON_GPU)


def cost(run: Callable[[], Any], images: int) -> dict[str, Any]:
    """Milliseconds, GFLOP and peak MiB of a call that was made twice before."""
    for _ in range(2):
        run()
    synchronize()
    row = count_flops(run)
    if not ON_GPU:
        return row | {"ms": min(cpu_ms(run) for _ in range(3)), "mib": peak_mib(run)}
    torch.cuda.reset_peak_memory_stats()
    step = Step(run, images)
    times = step.time(0.5)
    row |= {"wall_ms": times["wall_ms"], "mib": 1024 * times["peak_gib"]}
    counts = step.profile(2)
    return row | {"ms": counts["device_ms"], "kernels": counts["kernels"]}


def cpu_ms(run: Callable[[], Any], seconds: float = 0.3) -> float:
    """Milliseconds of CPU time a call, over at least so many seconds."""
    start, num = time.process_time(), 0
    while (elapsed := time.process_time() - start) < seconds:
        run()
        num += 1
    return 1000 * elapsed / num


def count_flops(run: Callable[[], Any]) -> dict[str, float]:
    """GFLOP of matrix products and convolutions, and the share of attention's products in them."""
    # Torch counts no fused attention of the CPU.
    context = nullcontext() if ON_GPU else sdpa_kernel([SDPBackend.MATH])
    with context, FlopCounterMode(display=False) as counter:
        run()
    total = counter.get_total_flops()
    counts = counter.get_flop_counts()["Global"].items()
    attention = sum(n for name, n in counts if re.search("bmm|scaled_dot|flash", str(name)))
    return {"gflop": total / 1e9, "attention": attention / max(total, 1)}


def tensor_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in local}
    return sum(storage.nbytes() for storage in storages.values())


def peak_mib(run: Callable[[], Any]) -> float:
    """Most MiB of tensors during a call on the CPU: those that exist, and what it allocates."""
    size = peak = tensor_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        size += event.nbytes()
        peak = max(peak, size)
    return peak / 2**20


def sweep(section: str, rows: Rows, values: list[int], make: Callable[[str, int], Any]) -> None:
    """Write a row for each network and value; `make` returns a call and its number of images."""
    for kind in NETWORKS:
        for value in values:
            run, images = make(kind, value)
            rows.write(section, f"{kind}, {value}", kind=kind, x=value, **cost(run, images))
            del run
            gc.collect()
            free_memory()


def batch(rows: Rows) -> None:
    sweep("batch", rows, BATCHES, lambda kind, n: (training(kind, batch=n), n))


def width(rows: Rows) -> None:
    sweep("width", rows, WIDTHS, lambda kind, n: (training(kind, width=n), BATCH))


def resolution(rows: Rows) -> None:
    sweep("resolution", rows, SIDES, lambda kind, n: (training(kind, side=n), BATCH))


def sampling(rows: Rows) -> None:
    def make(kind: str, steps: int) -> tuple[Callable[[], Any], int]:
        module = build(kind, solver=ours.ddim(steps)).eval()

        def run() -> None:
            with torch.autocast(device().type, torch.bfloat16, enabled=ON_GPU):
                module.generate(range(BATCH))

        return run, BATCH

    sweep("sampling", rows, STEPS, make)


class MeasureUpdate(Callback):
    """Measures what the hooks of an optimizer do after its step: the update of all averages."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        hooks = list(optimizer._optimizer_step_post_hooks.values())
        self.row = cost(lambda: [hook(optimizer, (), {}) for hook in hooks], 1)


def averages(rows: Rows) -> None:
    for kind in NETWORKS:
        for num in PROFILES:
            gc.collect()  # a Trainer and its module refer to each other
            free_memory()
            images, zero = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.uint8), torch.zeros(1).long()
            callbacks = [EMA([1 - 0.5**i for i in range(4, 4 + num)]), measure := MeasureUpdate()]
            options = {"accelerator": device().type, "devices": 1, "max_steps": 1}
            trainer = Trainer(**options, callbacks=callbacks, **dict.fromkeys(OFF, False))
            loader = DataLoader(TensorDataset(images, zero, zero))
            trainer.fit(build(kind, width=2 * WIDTH), loader)
            rows.write("averages", f"{kind}, {num}", kind=kind, x=num, **measure.row)


def nbytes(tree: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor))


class CountCollectives(TorchDispatchMode):
    """Counts collectives, and the bytes of all that each of them sums or gathers."""

    num = size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.num += 1
            self.size += max(map(nbytes, args))
        return func(*args, **(kwargs or {}))


def train_rank(rank: int, size: int, folder: str) -> None:
    """A rank of `ranks`: writes the costs of its steps to a file of the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/init", rank=rank, world_size=size)

    def shard(network: nn.Module) -> nn.Module:
        shard_network(network, init_device_mesh("cpu", (size,)), "32-true")
        return network

    costs = {}
    for how in PARALLEL:
        wrap = DistributedDataParallel if how.endswith("DDP") else shard
        run = training(how.split(", ")[0], parallel=wrap)
        for _ in range(2):  # in the second step DDP orders its buckets anew
            run()
        with CountCollectives() as count:
            run()
        cpu = time.process_time()
        for _ in range(3):
            run()
        costs[how] = {
            "ms": 1000 * (time.process_time() - cpu) / 3,
            "state_mib": tensor_bytes() / 2**20,
            "collectives": count.num,
            "collective_mib": count.size / 2**20,
        }
        del run
    Path(folder, str(rank)).write_text(json.dumps(costs))
    dist.destroy_process_group()


def ranks(rows: Rows) -> None:
    for size in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(train_rank, (size, folder), size, start_method="fork")
            costs = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]
        for how in PARALLEL:
            row = {name: max(each[how][name] for each in costs) for name in costs[0][how]}
            rows.write("ranks", f"{how}, {size}", kind=how, x=size, **row)


def make_folder(root: Path, num: int) -> None:
    """Class folders of 1,000 PNG files of 32x32 pixels, hard links of one for each folder."""
    for label in range(num // 1000):
        folder = root / f"class-{label:04}"
        folder.mkdir(parents=True)
        image = Image.effect_noise((32, 32), 64).convert("RGB")
        image.save(folder / "000000.png")
        for i in range(1, 1000):
            os.link(folder / "000000.png", folder / f"{i:06}.png")


def start(folder: str, cache: str) -> None:
    """Print the seconds and bytes until the first batch of a folder, in a fresh process."""

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    row: dict[str, float] = {}

    def timed(name: str, stage: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = stage()
        row[f"{name}_s"] = time.process_time() - cpu
        row[f"{name}_wall_s"] = time.perf_counter() - wall
        return result

    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts here
    before = peak()
    data = ImageFolder(folder, 100, 32, batch_size=64, num_workers=0, cache_dir=cache)
    timed("list", data.prepare_data)
    loader = timed("split", data.train_dataloader)
    timed("first_batch", lambda: next(iter(loader)))
    listing = data.dataset("train").listing
    num = len(listing.names)
    row["index_bytes"] = (listing.names.nbytes + listing.labels.nbytes) / num
    print(json.dumps(row | {"growth_mib": (peak() - before) / 2**20}))


def files(rows: Rows) -> None:
    command = [sys.executable, __file__, "--start"]
    for num in FILES:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            make_folder(Path(folder), num)
            first, second = (
                json.loads(subprocess.check_output([*command, folder, cache])) for _ in range(2)
            )
        row = second | {"check_s": first["list_s"] - second["list_s"]}
        row["us_per_file"] = 1e6 * second["list_s"] / num
        rows.write("files", f"{num:,}", kind="folder", x=num, **row)


def paper(rows: Rows) -> None:
    """Steps on 8 to 512 GPUs, from arithmetic, bytes and bandwidths; nothing is measured."""
    for config, kind, images in PAPER:
        model = yaml.safe_load((ours.CONFIGS / f"{config}.yaml").read_text())["model"]["init_args"]
        with torch.device("meta"):
            network = DiT(**model["network"]["init_args"]).to(torch.bfloat16)
        plan = measure_step(network, model["image_shape"], images)
        is_split = "FSDP2" in kind
        if (
            is_split
        ):  # gathered in bfloat16 twice, but for what belongs to no block; summed in float32
            size = 2 * (2 * plan.parameters - plan.rest) + 4 * plan.parameters
        else:  # an all-reduce is a reduce-scatter and an all-gather
            size = 2 * 4 * plan.parameters
        arithmetic = plan.flops / (SHARE * MATMUL_TFLOPS * 1e12)
        for gpus in (8, 16, 32, 64, 128, 256, 512):
            inside = size * (gpus - 1) / gpus / NVLINK
            between = size * (1 - NODE / gpus) / (NODE * NETWORK)  # once into each node
            communication = max(inside, between)
            alone = inside if gpus == NODE else size * (gpus - 1) / gpus / NETWORK
            none, all_hidden = arithmetic + communication, max(arithmetic, communication)
            row = {
                "state_gib": 5 * 4 * plan.parameters / (gpus if is_split else 1) / 2**30,
                "arithmetic_ms": 1000 * arithmetic,
                "communication_ms": 1000 * communication,
                "alone_ms": 1000 * alone,
                "hidden_images_per_s": gpus * images / all_hidden,
                "none_images_per_s": gpus * images / none,
                "efficiency": arithmetic / none,
            }
            rows.write("paper", f"{kind}, {gpus}", kind=kind, x=gpus, **row)


SECTIONS = {
    f.__name__: f for f in (batch, width, resolution, averages, sampling, ranks, files, paper)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=" ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("growth.jsonl"))
    parser.add_argument("--commit", default="unknown", help="written into every row")
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(*options.start)
        return
    if wrong := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"there is no section {wrong[0]}; choose from {', '.join(SECTIONS)}")
    if not ON_GPU:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if ON_GPU else f"one thread of a CPU, {platform.machine()}"
    versions = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    rows = Rows(options.out, commit=options.commit, date=str(date.today()), **versions)
    for section in options.sections or SECTIONS:
        begin = time.perf_counter()
        SECTIONS[section](rows)
        print(f"{section}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
