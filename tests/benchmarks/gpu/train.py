"""Training steps: ours, eager and compiled, beside those of other libraries."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import ours
import peers
import torch
from measure import Rows, Step, device
from torch import Tensor
from turns import Body, Channel, Worker, WorkerError


def images_and_labels(size: int, batch: int) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device())
    return images, torch.randint(0, 1000, (batch,), device=device())


def serve(
    channel: Channel, network: Any, loss: Callable[[], Tensor], how: str, images: int, is_dit: bool
) -> None:
    """Time training steps of a network that is compiled already, as `how` says."""
    training = ours.Training(network, torch.optim.AdamW if is_dit else torch.optim.Adam)
    step = ours.training_step(training, loss)
    Step(step, images, training.release, how == "eager").serve(channel)


def our_step(
    channel: Channel, config: str, how: str, tiny: bool, inputs: Any, **settings: Any
) -> None:
    """The body of a process with a module of ours."""
    tensors = inputs()
    module = ours.build(config, tiny, **settings)
    ours.compile_(module, how)
    loss = partial(ours.loss_of, module, *tensors)
    serve(channel, module.network, loss, how, len(tensors[0]), "latents" in config)


def their_step(
    channel: Channel, build: Any, call: Any, how: str, tiny: bool, inputs: Any, is_dit: bool = False
) -> None:
    """The body of a process with another's network, by call(network, x_t, t, labels)."""
    network, tensors = build(tiny), inputs()
    ours.compile_network_(network, how)
    loss = peers.noise_loss(partial(call, network), *tensors)
    serve(channel, network, loss, how, len(tensors[0]), is_dit)


# CIFAR-10: the network of configs/cifar10-improved.yaml, 52.5 million parameters


def cifar10(tiny: bool) -> dict[str, Body]:
    def images() -> tuple[Tensor]:
        return images_and_labels(*((8, 4) if tiny else (32, 128)))[:1]

    def call(network: Any, x: Tensor, t: Tensor, _: None) -> Tensor:
        return network(x, t).sample

    def improved_diffusion(channel: Channel) -> None:
        (x,) = images()
        Step(peers.improved_diffusion_step(x, tiny), len(x)).serve(channel)

    common = {"tiny": tiny, "inputs": images}
    unet = partial(our_step, config="cifar10-improved", **common)
    theirs = partial(their_step, build=peers.diffusers_unet, call=call, **common)
    bodies: dict[str, Body] = {}
    for how in ("eager", "compiled", "CUDA graphs"):
        bodies[f"ours, channels_last, {how}"] = partial(unet, how=how, channels_last=True)
        bodies[f"diffusers, {how}"] = partial(theirs, how=how)
    for how in ("eager", "compiled"):
        bodies[f"ours, contiguous, {how}"] = partial(unet, how=how, channels_last=False)
    return bodies | {"improved-diffusion, fp16": improved_diffusion}


# DiT-XL/2 on latents: 675 million parameters


def dit(tiny: bool) -> dict[str, Body]:
    def latents() -> tuple[Tensor, Tensor]:
        size, batch = (8, 2) if tiny else (32, 64)
        images = torch.randn(batch, 4, size, size, device=device())
        return images, torch.randint(0, 1000, (batch,), device=device())

    def call(network: Any, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return network(x, timestep=t, class_labels=labels).sample

    def original_dit(channel: Channel, how: str) -> None:
        network, loss = peers.dit_loss(tiny)
        ours.compile_network_(network, how)
        inputs = latents()
        serve(channel, network, partial(loss, network, *inputs), how, len(inputs[0]), True)

    common = {"tiny": tiny, "inputs": latents}
    theirs = partial(their_step, build=peers.diffusers_dit, call=call, is_dit=True, **common)
    bodies: dict[str, Body] = {}
    for how in ("eager", "compiled", "blocks compiled"):
        bodies[f"ours, {how}"] = partial(our_step, config="imagenet256-latents", how=how, **common)
        bodies[f"diffusers, {how}"] = partial(theirs, how=how)
        bodies[f"facebookresearch/DiT, {how}"] = partial(original_dit, how=how)
    return bodies


# ImageNet-128: the network of configs/imagenet128-guided.yaml, 422 million parameters


def imagenet128(tiny: bool) -> dict[str, Body]:
    def inputs() -> tuple[Tensor, Tensor]:
        return images_and_labels(*((16, 2) if tiny else (128, 32)))

    def guided_diffusion(channel: Channel) -> None:
        x, labels = inputs()
        Step(peers.guided_diffusion_step(x, labels, tiny), len(x)).serve(channel)

    ours_as = partial(our_step, config="imagenet128-guided", tiny=tiny, inputs=inputs)
    bodies: dict[str, Body] = {
        f"ours, {how}": partial(ours_as, how=how) for how in ("eager", "compiled")
    }
    return bodies | {"guided-diffusion, fp16": guided_diffusion}


def interleave(
    section: str,
    workers: Sequence[Worker],
    rows: Rows,
    deadline: float,
    matmul_tflops: float | None,
    seconds: float,
    rounds: int,
) -> None:
    """Time all workers in rounds, and write a row of each after every turn."""
    measured: dict[Worker, dict[str, Any]] = {
        worker: {"first_step_s": worker.first_reply, "walls": []} for worker in workers
    }
    for round_number in range(rounds):
        for worker, row in list(measured.items()):
            left = min(deadline - time.time(), 60)
            if left < 1:
                return
            try:
                row.update(worker.call(left, "time", seconds))
                row["walls"].append(row["wall_ms"])
                if round_number == 0:
                    num = 3 if row["wall_ms"] < 1000 else 1
                    row.update(worker.call(left, "profile", num))
                    row["flops"] = worker.call(left, "flops")
            except WorkerError as error:
                rows.write(section, worker.name, error=str(error)[-1500:])
                del measured[worker]
                continue
            library = worker.name.split(",")[0]
            counts = [
                other["flops"]
                for each, other in measured.items()
                if each.name.split(",")[0] == library and other.get("flops")
            ]  # of the library's eager step, which does the same products
            flops = counts[0] if counts else None
            rows.write(section, worker.name, **summary(row, flops, matmul_tflops))


def summary(
    row: dict[str, Any], flops: float | None, matmul_tflops: float | None
) -> dict[str, Any]:
    """A row with rates, in four digits."""
    wall_ms, device_ms, images = median(row["walls"]), row.get("device_ms"), row["images"]
    row = row | {"wall_ms": wall_ms, "images_per_s": 1000 * images / wall_ms, "flops": flops}
    if device_ms:
        row["device_images_per_s"] = 1000 * images / device_ms
    if flops and matmul_tflops:
        row["matmul_share"] = flops / 1e9 / wall_ms / matmul_tflops
        if device_ms:
            row["device_matmul_share"] = flops / 1e9 / device_ms / matmul_tflops
    row["walls"] = [round(ms, 3) for ms in row["walls"]]
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
