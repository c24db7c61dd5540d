"""Trains on two gloo ranks under torchrun, of which one meets what is not finite.

Arguments: folder; "loss", "constant" (a loss that is not finite, with a gradient that is) or
"gradient"; the rank that meets it; how many updates may be left out.
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from lit_diffusion.callbacks import EMA, FiniteUpdates
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion


def main(folder: Path, kind: str, rank: int, allowed: int) -> None:
    module = tiny_diffusion()
    original, states = module.per_sample_loss, []

    def per_sample_loss(x0, labels, t, noise, step=None):
        losses = original(x0, labels, t, noise, step)
        if step != 2 or module.global_rank != rank:
            return losses
        first = torch.arange(len(losses)) == 1
        if kind == "loss":
            return torch.where(first, losses * math.nan, losses)
        if kind == "constant":
            return torch.where(first, math.inf, losses)
        zero = module.network.leave.bias.sum() * 0
        return losses + (zero * zero).sqrt()

    module.per_sample_loss = per_sample_loss
    ema, guard = EMA((0.9,)), FiniteUpdates(allowed)
    step = module.on_train_batch_end = lambda *args: states.append(state(module, ema))
    trainer = make_trainer(folder, ema, guard, devices=2, strategy="ddp", max_epochs=1)
    error = None
    try:
        trainer.fit(module, images(32, 4))
    except FloatingPointError as stop:
        error = str(stop)
        step()
    found = {
        "states": states,
        "error": error,
        "skipped": guard.skipped_updates,
        "steps": len(states),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


def state(module, ema):
    """Weights, optimizer state and averages as one list of numbers."""
    optimizer = module.trainer.optimizers[0].state_dict()["state"]
    tensors = [p.detach() for p in module.parameters()]
    tensors += [value for entry in optimizer.values() for value in entry.values()]
    tensors += ema.state_dict()["shadows"][0].values()
    return [tensor.double().sum().item() for tensor in tensors]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # torch aborts at times while it takes groups apart
