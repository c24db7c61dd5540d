"""The state that a module must be in to be asked for samples or losses, in any hook."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

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


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """eval() that gives every submodule its own flag back."""
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[str]:
    """Context with the weights "ema" of all WeightsProviders in place.

    Yields:
        "ema", or "raw" where no callback provides such weights.
    """
    providers = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, WeightsProvider) and "ema" in callback.names()
    ]
    with ExitStack() as stack:
        for provider in providers:
            stack.enter_context(provider.weights("ema"))
        yield "ema" if providers else "raw"
