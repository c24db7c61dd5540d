"""Training steps: ours, eager and compiled, beside those of other libraries."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import ours
import peers
import torch
from measure import Rows, Step, Steps, device
from torch import Tensor
from turns import Body, Channel, Worker, WorkerError


def images_and_labels(size: int, batch: int) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device())
    return images, torch.randint(0, 1000, (batch,), device=device())


# CIFAR-10: the network of configs/cifar10-improved.yaml, 52.5 million parameters


def cifar10(tiny: bool, graphs: bool = False) -> dict[str, Body]:
    size, batch = (8, 4) if tiny else (32, 128)

    def our_unet(channels_last: bool, mode: str | None, blocks: bool = False) -> Body:
        def body(channel: Channel) -> None:
            module = ours.build("cifar10-improved", tiny, channels_last=channels_last)
            if mode is not None:
                module = ours.compiled(module, mode)
            elif blocks:
                module = ours.with_compiled_blocks(module)
            training = ours.Training(module.network)
            images, _ = images_and_labels(size, batch)
            run = ours.training_step(module, training, images)
            Steps({"step": Step(run, batch, is_eager=not (mode or blocks))}).serve(channel)

        return body

    def their_unet(mode: str | None) -> Body:
        def body(channel: Channel) -> None:
            network = peers.diffusers_unet(tiny)
            network = network if mode is None else peers.compiled(network, mode)
            images, _ = images_and_labels(size, batch)
            run = peers.training_step(
                lambda x, t, _: network(x, t).sample, ours.Training(network), images
            )
            Steps({"step": Step(run, batch, is_eager=mode is None)}).serve(channel)

        return body

    def improved_diffusion(channel: Channel) -> None:
        images, _ = images_and_labels(size, batch)
        run = peers.improved_diffusion_step(images, tiny)
        Steps({"step": Step(run, batch)}, counts_flops=False).serve(channel)

    if graphs:  # by themselves, as each holds its memory for good
        return {
            "ours, channels_last, CUDA graphs": our_unet(True, "reduce-overhead"),
            "diffusers, CUDA graphs": their_unet("reduce-overhead"),
        }
    return {
        "ours, channels_last, eager": our_unet(True, None),
        "ours, channels_last, compiled": our_unet(True, "default"),
        "diffusers, compiled": their_unet("default"),
        "diffusers, eager": their_unet(None),
        "ours, contiguous, eager": our_unet(False, None),
        "ours, contiguous, compiled": our_unet(False, "default"),
        "ours, channels_last, blocks compiled": our_unet(True, None, blocks=True),
        "improved-diffusion, fp16": improved_diffusion,
    }


# DiT-XL/2 on latents: 675 million parameters. Variants of one process share the weights, as several
# sets of weights, gradients and moments would not fit into the memory beside the activations.


def dit(tiny: bool) -> dict[str, Body]:
    size, batch = (8, 2) if tiny else (32, 64)

    def latents() -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 4, size, size, device=device())
        return x, torch.randint(0, 1000, (batch,), device=device())

    def our_dit(channel: Channel) -> None:
        module, inputs = ours.build("imagenet256-latents", tiny), latents()
        training = ours.Training(module.network, torch.optim.AdamW)
        whole, blocks = ours.compiled(module), ours.with_compiled_blocks(module)
        steps = {
            name: Step(ours.training_step(each, training, *inputs), batch, name == "eager")
            for name, each in (("eager", module), ("blocks compiled", blocks), ("compiled", whole))
        }
        Steps(steps).serve(channel)

    def diffusers_dit(channel: Channel) -> None:
        network, inputs = peers.diffusers_dit(tiny), latents()
        training = ours.Training(network, torch.optim.AdamW)
        steps = {}
        for name, each in (("eager", network), ("compiled", peers.compiled(network))):
            run = peers.training_step(
                lambda x, t, labels, each=each: each(x, timestep=t, class_labels=labels).sample,
                training,
                *inputs,
            )
            steps[name] = Step(run, batch, name == "eager")
        Steps(steps).serve(channel)

    def own_dit(channel: Channel) -> None:
        network, loss = peers.dit_loss(tiny)
        inputs, training = latents(), ours.Training(network, torch.optim.AdamW)

        def step(each: torch.nn.Module) -> Tensor:
            with torch.autocast(device().type, torch.bfloat16):
                value = loss(each, *inputs)
            value.backward()
            training.update()
            return value

        fast = peers.compiled(network)
        steps = {
            "eager": Step(lambda: step(network), batch),
            "compiled": Step(lambda: step(fast), batch, is_eager=False),
        }
        Steps(steps).serve(channel)

    return {"ours": our_dit, "diffusers": diffusers_dit, "facebookresearch/DiT": own_dit}


# ImageNet-128: the network of configs/imagenet128-guided.yaml, 422 million parameters


def imagenet128(tiny: bool) -> dict[str, Body]:
    size, batch = (16, 2) if tiny else (128, 32)

    def our_unet(compiles: bool) -> Body:
        def body(channel: Channel) -> None:
            module = ours.build("imagenet128-guided", tiny, channels_last=True)
            if compiles:
                module = ours.compiled(module)
            training, inputs = ours.Training(module.network), images_and_labels(size, batch)
            run = ours.training_step(module, training, *inputs)
            Steps({"step": Step(run, batch, is_eager=not compiles)}).serve(channel)

        return body

    def guided_diffusion(channel: Channel) -> None:
        run = peers.guided_diffusion_step(*images_and_labels(size, batch), tiny)
        Steps({"fp16": Step(run, batch)}, counts_flops=False).serve(channel)

    return {
        "ours, eager": our_unet(compiles=False),
        "guided-diffusion": guided_diffusion,
        "ours, compiled": our_unet(compiles=True),
    }


def interleave(
    section: str,
    workers: Sequence[Worker],
    rows: Rows,
    deadline: float,
    matmul_tflops: float | None,
    seconds: float,
    rounds: int,
) -> None:
    """Time all steps of the workers in rounds, and write a row of each after every round."""
    steps: dict[tuple[Worker, str], dict[str, Any]] = {}
    for worker in workers:
        left = deadline - time.time()
        for name, first in worker.call(left, "first").items():
            variant = worker.name if name == "step" else f"{worker.name}, {name}"
            steps[worker, name] = {"variant": variant, "walls": [], "first_step_s": round(first, 1)}
    for round_number in range(rounds):
        for (worker, name), row in list(steps.items()):
            left = min(deadline - time.time(), 60)
            if left < 1:
                return
            try:
                row.update(worker.call(left, "time", name, seconds))
                row["walls"].append(round(row["wall_ms"], 3))
                if round_number == 0:
                    row.update(worker.call(left, "profile", name))
                    row["flops"] = worker.call(left, "flops", name)
            except WorkerError as error:
                rows.write(section, row["variant"], error=str(error)[-1500:])
                del steps[worker, name]
                continue
            write_row(section, row, rows, flops_of(worker, steps), matmul_tflops)


def flops_of(worker: Worker, steps: dict[tuple[Worker, str], dict[str, Any]]) -> float | None:
    """Operations of an eager step of the same library, which are counted; None if there is none."""
    library = worker.name.split(",")[0]
    counts = [
        row["flops"]
        for (other, _), row in steps.items()
        if other.name.split(",")[0] == library and row.get("flops")
    ]
    return counts[0] if counts else None


def write_row(
    section: str, row: dict[str, Any], rows: Rows, flops: float | None, matmul_tflops: float | None
) -> None:
    row = dict(row)
    variant, wall_ms = row.pop("variant"), median(row["walls"])
    device_ms, images = row.get("device_ms"), row["images"]
    row |= {"wall_ms": wall_ms, "images_per_s": 1000 * images / wall_ms, "flops": flops}
    if device_ms:
        row["device_images_per_s"] = 1000 * images / device_ms
    if flops and matmul_tflops:
        row["matmul_share"] = flops / 1e9 / wall_ms / matmul_tflops
        if device_ms:
            row["device_matmul_share"] = flops / 1e9 / device_ms / matmul_tflops
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    rows.write(section, variant, **rounded)
