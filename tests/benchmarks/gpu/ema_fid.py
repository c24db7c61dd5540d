"""One update of the average of the CIFAR-10 network's weights, and the FID of 2,000 samples.

Inception has random weights, as the real ones cannot be had everywhere: only its time means
something.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ours
import torch
import torch_fidelity.feature_extractor_inceptionv3 as inception
from ceilings import timed
from fit_overhead import NoiseImages
from lightning.pytorch import Callback, Trainer
from measure import device, synchronize
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from turns import Body, Channel

from lit_diffusion.callbacks import EMA, FIDEvaluation
from lit_diffusion.callbacks.ema import ema_update_
from lit_diffusion.metrics.extractors import InceptionV3Compat

DECAY = 0.9999


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= {"accelerator": device().type, "devices": 1, "callbacks": list(callbacks)}
    return Trainer(**options, **dict.fromkeys(off, False))


def averages(tiny: bool) -> dict[str, Body]:
    def body(channel: Channel) -> None:
        channel.reply()
        channel.request()
        module = ours.build("cifar10-improved", tiny)
        rows = {name: timed_update(update) for name, update in updates(module.network).items()}
        rows["ours: what the callback does after a step"] = callback_update(module, tiny)
        channel.reply(rows)

    return {"averages": body}


def updates(network: nn.Module) -> dict[str, Callable[[], Any]]:
    parameters = list(network.parameters())
    shadow = [p.detach().clone() for p in parameters]
    found_inf = torch.zeros((), device=device())
    averaged = AveragedModel(
        network, device=device(), multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    )

    @torch.no_grad()
    def loop() -> None:
        for average, parameter in zip(shadow, parameters, strict=True):
            average.mul_(DECAY).add_(parameter, alpha=1 - DECAY)

    @torch.no_grad()
    def lerp() -> None:
        torch._foreach_lerp_(shadow, parameters, 1 - DECAY)

    return {
        "ours: ema_update_": lambda: ema_update_(shadow, parameters, DECAY),
        "ours: ema_update_ that the device may skip": lambda: ema_update_(
            shadow, parameters, DECAY, found_inf
        ),
        "torch._foreach_lerp_": lerp,
        "torch's AveragedModel, Lightning's EMAWeightAveraging": lambda: averaged.update_parameters(
            network
        ),
        "loop over tensors, as in DiT and improved-diffusion": loop,
    }


def timed_update(update: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of an update, and those until its call returns."""
    ms = timed(update, repeats=50)
    synchronize()
    start = time.perf_counter()
    for _ in range(20):
        update()
    host = 1000 * (time.perf_counter() - start) / 20
    synchronize()
    return {"ms": round(ms, 4), "host_ms": round(host, 4)}


class AfterStep(Callback):
    """Times what the hooks of an optimizer do after its step."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        hooks = list(optimizer._optimizer_step_post_hooks.values())
        self.row = timed_update(lambda: [hook(optimizer, (), {}) for hook in hooks])


def callback_update(module: Any, tiny: bool) -> dict[str, float]:
    if tiny:
        module.image_shape = (3, 32, 32)
    trainer = quiet_trainer(EMA((DECAY,)), clock := AfterStep(), max_steps=1)
    trainer.fit(module, NoiseImages(batch_size=4).train_dataloader())
    return clock.row


class RandomInception(inception.FeatureExtractorInceptionV3):
    """Torch-fidelity's Inception before it loads its weights."""

    def load_state_dict(self, *args: object, **kwargs: object) -> None:
        """Keep the initial weights."""


def random_inception(folder: Path) -> InceptionV3Compat:
    empty, path = folder / "empty.pt", folder / "inception.pt"
    torch.save({}, empty)
    torch.manual_seed(0)
    network = RandomInception("random", ["2048"], feature_extractor_weights_path=str(empty))
    torch.save(network.state_dict(), path)
    return InceptionV3Compat(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def evaluations(tiny: bool) -> dict[str, Body]:
    num, batch, steps = (8, 4, 2) if tiny else (2000, 500, 20)

    def body(channel: Channel) -> None:
        channel.reply()
        channel.request()
        folder = Path(tempfile.mkdtemp())
        extractor = "patches-cnn" if tiny else random_inception(folder)
        module = ours.build("cifar10-improved", tiny, solver=ours.ddim(steps), channels_last=True)
        module.image_shape = (3, 32, 32)
        evaluation = FIDEvaluation(
            num, extractor, batch_size=batch, save_best=False, cache_dir=str(folder / "cache")
        )
        options = {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1}
        options |= {"num_sanity_val_steps": 0, "default_root_dir": folder}
        options["precision"] = "bf16-mixed" if torch.cuda.is_available() else "32-true"
        trainer = quiet_trainer(EMA((DECAY,)), evaluation, **options)
        trainer.fit(module, NoiseImages(batch_size=4 if tiny else 128))
        lines = (folder / "evaluations.jsonl").read_text().splitlines()
        first, *_, last = [json.loads(line)["seconds"] for line in lines]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        row = {f"{part}_seconds": seconds for part, seconds in last.items()}
        row |= {"first_seconds": first["total"], "peak_gib": peak}  # first: real images as well
        channel.reply({f"FID of {num}, DDIM({steps}), bf16-mixed": row})

    return {"evaluations": body}
