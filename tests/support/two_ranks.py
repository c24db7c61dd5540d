"""Trains on two gloo ranks under torchrun; writes what each rank drew and measured to a folder."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from lit_diffusion.callbacks import EMA, NoiseLevelLoss, SampleGrid, StepSeed
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion


def main(folder: Path) -> None:
    module = tiny_diffusion()
    step, drawn = module.training_step, []

    def training_step(batch, batch_idx):
        drawn.append(torch.rand(1).item())
        return step(batch, batch_idx)

    module.training_step = training_step
    module.on_train_batch_start = lambda batch, batch_idx: None  # leave seeding to StepSeed
    ema, levels = EMA((0.9,)), NoiseLevelLoss(num_levels=3, num_images=10)
    trainer = make_trainer(
        folder, StepSeed(0), ema, levels, SampleGrid(3), devices=2, strategy="ddp", max_epochs=1
    )
    trainer.fit(module, images(32, 4), images(12, 4))
    found = {
        "drawn": drawn,
        "average": [v.tolist() for v in ema.state_dict()["shadows"][0].values()],
        "levels": {k: v.item() for k, v in trainer.callback_metrics.items() if "loss_u" in k},
        "memorized": trainer.callback_metrics["val/memorized"].item(),
    }
    trainer.save_checkpoint(folder / "end.ckpt")
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # torch aborts at times while it takes groups apart
