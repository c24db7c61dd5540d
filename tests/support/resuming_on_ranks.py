"""Has a run on two gloo ranks die and resumes it; writes that it ended as an undisturbed one."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from support.resuming import Recipe, assert_undisturbed
from support.streamed import open_digits

DDP = (("devices", 2), ("strategy", "ddp"), ("accumulate_grad_batches", 2))


def main(folder: Path, batch: int, workers: int, *streamed: str) -> None:
    # An epoch has five batches of the two ranks, as of the one elsewhere.
    callbacks = ("EMA", "MomentumDecay", "NoiseLevelLoss")
    data = {"data": open_digits(*streamed)} if streamed else {}
    recipe = Recipe(callbacks, (workers, workers), trainer=DDP, batch_size=140, **data)
    assert_undisturbed(folder, recipe, batch)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps("undisturbed"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    os._exit(0)  # torch aborts at times while it takes groups apart
