"""Training steps: ours, eager and compiled, beside those of other libraries."""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import ours
import peers
import torch
from measure import Rows, Step, Turns, device
from torch import Tensor
from turns import Body, Channel, Worker, WorkerError


def images_and_labels(size: int, batch: int) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device())
    return images, torch.randint(0, 1000, (batch,), device=device())


def latents_and_labels(size: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, size, size, device=device()), torch.randint(
        0, 1000, (batch,), device=device()
    )


def our_step(
    channel: Channel, config: str, how: str, tiny: bool, inputs: Any, **settings: Any
) -> None:
    """The body of a process with a module of ours."""
    tensors = inputs()
    module = ours.build(config, tiny, **settings)
    ours.compile_(module, how)
    optimizer = torch.optim.AdamW if "latents" in config else torch.optim.Adam
    training = ours.Training(module.network, optimizer)
    run = ours.training_step(module, training, *tensors)
    Turns(Step(run, len(tensors[0]), training.release, how == "eager")).serve(channel)


# CIFAR-10: the network of configs/cifar10-improved.yaml, 52.5 million parameters


def cifar10(tiny: bool) -> dict[str, Body]:
    def images() -> tuple[Tensor]:
        return images_and_labels(*((8, 4) if tiny else (32, 128)))[:1]

    def unet(channels_last: bool, how: str) -> Body:
        return partial(
            our_step,
            config="cifar10-improved",
            how=how,
            tiny=tiny,
            inputs=images,
            channels_last=channels_last,
        )

    def diffusers_unet(channel: Channel, how: str) -> None:
        network, (x,) = peers.diffusers_unet(tiny), images()
        ours.compile_network_(network, how)
        training = ours.Training(network)
        run = peers.training_step(lambda x, t, _: network(x, t).sample, training, x)
        Turns(Step(run, len(x), training.release, how == "eager")).serve(channel)

    def improved_diffusion(channel: Channel) -> None:
        (x,) = images()
        Turns(Step(peers.improved_diffusion_step(x, tiny), len(x))).serve(channel)

    bodies: dict[str, Body] = {}
    for how in ("eager", "compiled", "CUDA graphs"):
        bodies[f"ours, channels_last, {how}"] = unet(True, how)
        bodies[f"diffusers, {how}"] = partial(diffusers_unet, how=how)
    for how in ("eager", "compiled"):
        bodies[f"ours, contiguous, {how}"] = unet(False, how)
    return bodies | {"improved-diffusion, fp16": improved_diffusion}


# DiT-XL/2 on latents: 675 million parameters


def dit(tiny: bool) -> dict[str, Body]:
    def latents() -> tuple[Tensor, Tensor]:
        return latents_and_labels(*((8, 2) if tiny else (32, 64)))

    def diffusers_dit(channel: Channel, how: str) -> None:
        network, inputs = peers.diffusers_dit(tiny), latents()
        ours.compile_network_(network, how)
        training = ours.Training(network, torch.optim.AdamW)
        run = peers.training_step(
            lambda x, t, labels: network(x, timestep=t, class_labels=labels).sample,
            training,
            *inputs,
        )
        Turns(Step(run, len(inputs[0]), training.release, how == "eager")).serve(channel)

    def own_dit(channel: Channel, how: str) -> None:
        network, loss = peers.dit_loss(tiny)
        ours.compile_network_(network, how)
        inputs, training = latents(), ours.Training(network, torch.optim.AdamW)

        def run() -> Tensor:
            with torch.autocast(device().type, torch.bfloat16):
                value = loss(network, *inputs)
            value.backward()
            training.update()
            return value

        Turns(Step(run, len(inputs[0]), training.release, how == "eager")).serve(channel)

    bodies: dict[str, Body] = {}
    for how in ("eager", "compiled", "blocks compiled"):
        bodies[f"ours, {how}"] = partial(
            our_step, config="imagenet256-latents", how=how, tiny=tiny, inputs=latents
        )
        bodies[f"diffusers, {how}"] = partial(diffusers_dit, how=how)
        bodies[f"facebookresearch/DiT, {how}"] = partial(own_dit, how=how)
    return bodies


# ImageNet-128: the network of configs/imagenet128-guided.yaml, 422 million parameters


def imagenet128(tiny: bool) -> dict[str, Body]:
    def inputs() -> tuple[Tensor, Tensor]:
        return images_and_labels(*((16, 2) if tiny else (128, 32)))

    def guided_diffusion(channel: Channel) -> None:
        x, labels = inputs()
        Turns(Step(peers.guided_diffusion_step(x, labels, tiny), len(x))).serve(channel)

    bodies: dict[str, Body] = {
        f"ours, {how}": partial(
            our_step, config="imagenet128-guided", how=how, tiny=tiny, inputs=inputs
        )
        for how in ("eager", "compiled")
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
