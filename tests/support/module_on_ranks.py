"""Trains a DiffusionModule on gloo ranks under torchrun; writes what each drew, and its end."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion


def main(folder: Path) -> None:
    module = tiny_diffusion()
    original, drawn = module.per_sample_loss, []

    def per_sample_loss(x0, labels, t, noise, step=None):
        drawn.append([*t.tolist(), noise.double().sum().item()])
        return original(x0, labels, t, noise, step)

    module.per_sample_loss = per_sample_loss
    trainer = make_trainer(folder, devices=2, strategy="ddp", max_epochs=1)
    trainer.fit(module, images(32, 4))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).double()
    found = {"drawn": drawn, "weights": [weights.sum().item(), weights.square().sum().item()]}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # torch aborts at times while it takes groups apart
