"""Trains with MomentumDecay on two gloo ranks; writes what updates used, and the weights."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from lightning.pytorch import Trainer

from lit_diffusion.callbacks import MomentumDecay, StepSeed
from support.plain_module import loader
from support.recorded import Recorded


def main(folder: Path) -> None:
    module = Recorded(schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8))
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=[StepSeed(0), MomentumDecay()],
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(64, 4))
    found = {
        "used": module.used,
        "seen": module.seen,
        "losses": module.losses,
        "weights": [p.tolist() for p in module.parameters()],
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
