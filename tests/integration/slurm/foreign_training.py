"""A Lightning project of somebody else, with one callback of ours; rank 0 is slow."""

import os
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import SaveOnSignal


class Uneven(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.1 if self.global_rank == 0 else 0)
        if self.global_step == 5:
            open("reached-step-5", "w").close()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


seed_everything(1)
data = DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=2)
saver = SaveOnSignal("checkpoints")
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=int(os.environ["SLURM_NNODES"]),
    strategy="ddp",
    max_epochs=2,
    callbacks=[saver],
    logger=False,
    enable_checkpointing=True,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Uneven(), data, ckpt_path=saver.checkpoint_of_requeue())
if trainer.is_global_zero:
    print(f"ended at step {trainer.global_step}")
