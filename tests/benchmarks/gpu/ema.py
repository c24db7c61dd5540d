"""The exponential moving average of the CIFAR-10 network's weights: one update."""

import time
from collections.abc import Callable
from typing import Any

import ours
import torch
from ceilings import timed
from fit_overhead import NoiseImages
from lightning.pytorch import Callback, Trainer
from measure import device, synchronize
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from turns import Body, Channel

from lit_diffusion.callbacks import EMA
from lit_diffusion.callbacks.ema import ema_update_

DECAY = 0.9999


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
    trainer = Trainer(
        max_steps=1,
        accelerator=device().type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EMA((DECAY,)), clock := AfterStep()],
    )
    if tiny:
        module.image_shape = (3, 32, 32)
    trainer.fit(module, NoiseImages(batch_size=4).train_dataloader())
    return clock.row
