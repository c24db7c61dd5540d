"""Trains with MomentumDecay on two gloo ranks; writes what updates used, and the weights."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from lit_diffusion.callbacks import MomentumDecay, StepSeed
from support.plain_module import loader, make_trainer
from support.recorded import Recorded


def main(folder: Path) -> None:
    module = Recorded(schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8))
    trainer = make_trainer(
        folder,
        StepSeed(0),
        MomentumDecay(),
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
    )
    trainer.fit(module, loader(64, 4))
    found = {
        "used": module.used,
        "visible": module.visible,
        "losses": module.losses,
        "weights": [p.tolist() for p in module.parameters()],
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # torch aborts at times while it takes groups apart
