"""The state that a module must be in to be asked for samples or losses, in any hook."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from lit_diffusion.modes import eval_mode
from lit_diffusion.protocols import WeightsProvider


@contextmanager
def inference(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """No gradient, eval mode, the Trainer's precision; random numbers drawn inside leave no trace.

    Not torch's inference mode: tensors that a module caches inside must be usable in training.
    """
    with (
        isolate_rng(),
        torch.no_grad(),
        eval_mode(module),
        trainer.precision_plugin.forward_context(),
    ):
        yield


def providers(trainer: Trainer, name: str) -> list[WeightsProvider]:
    """The callbacks that have the named weights."""
    known = [c for c in trainer.callbacks if isinstance(c, WeightsProvider)]  # type: ignore[attr-defined]
    return [provider for provider in known if name in provider.names()]


@contextmanager
def weights_in_place(trainer: Trainer, name: str) -> Iterator[None]:
    """Context with the named weights, of every callback that has them, in place."""
    with ExitStack() as stack:
        for provider in providers(trainer, name):
            stack.enter_context(provider.weights(name))
        yield


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[str]:
    """Context with the weights "ema" in place, or "raw" where no callback provides them."""
    with weights_in_place(trainer, "ema"):
        yield "ema" if providers(trainer, "ema") else "raw"
