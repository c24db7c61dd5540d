"""A fit of split weights with PowerEMA on gloo ranks, which saves checkpoints/last.ckpt."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from lit_diffusion.callbacks import PowerEMA
from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from support.plain_module import loader, make_trainer
from support.sharded import Split, strategy, trained


class Recorded(Split):
    """Remembers its whole weights after each step."""

    def on_train_start(self):
        self.path = []

    def on_train_batch_end(self, *args):
        self.path.append(trained(self.trainer))


def fit(folder, epochs, ckpt_path=None, **options):
    """The trainer after a fit of so many epochs in all, of 4 steps each."""
    ema = PowerEMA(snapshot_every_n_steps=4, prefix="net")
    plugins = [AtomicCheckpointIO()]
    options |= {"max_epochs": epochs, "use_distributed_sampler": False}
    trainer = make_trainer(folder, ema, plugins=plugins, **options)
    trainer.fit(Recorded(), loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt", weights_only=False)
    return trainer


def main(folder: Path, epochs: str, ckpt_path: str | None = None) -> None:
    trainer = fit(folder, int(epochs), ckpt_path, **strategy(int(os.environ["WORLD_SIZE"])))
    shadows = [shadow for ema in trainer.callbacks[:1] for g in ema._groups for shadow in g.shadows]
    assert all(is_dtensor(tensor) for column in shadows for tensor in column)
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(trainer.global_step))
    dist.barrier()
    # Leaves without taking the process group apart: gloo aborts there one time in about twenty.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
