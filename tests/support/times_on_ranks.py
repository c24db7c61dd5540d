"""Trains on two gloo ranks with batches of 8 and 5; writes what each was visible and drew."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import LossSecondMomentResampler, StepSeed, TimestepCurriculum
from support.foreign_times import ForeignTimes
from support.plain_module import make_trainer

WRITERS = {
    "TimestepCurriculum": lambda: TimestepCurriculum(3, num_bins=6),
    "LossSecondMomentResampler": lambda: LossSecondMomentResampler(2, history=3),
}


class Ragged(ForeignTimes):
    def train_dataloader(self):
        size = (8, 5)[self.global_rank]
        return DataLoader(TensorDataset(torch.randn(4 * size, 4)), batch_size=size)


def lists(value):
    """Tensors as lists of numbers, at any depth."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, int):
        return value.tolist() if isinstance(value, torch.Tensor) else value
    return [lists(item) for item in value]


def main(folder: Path, writer: str) -> None:
    module, callback = Ragged(), WRITERS[writer]()
    trainer = make_trainer(
        folder,
        StepSeed(0),
        callback,
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=1,
    )
    trainer.fit(module)
    found = {
        "visible": lists(module.visible),
        "drawn": lists(module.drawn),
        "weights": lists(module.parameters()),
        "state": lists(callback.state_dict().values()),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    os._exit(0)  # torch aborts at times while it takes groups apart
