"""Fits with split weights on gloo ranks, saves end.ckpt, and writes the losses of each rank."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist

from support.sharded import fit, strategy


def main(folder: Path, epochs: str, kind: str, ckpt_path: str | None = None) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = fit(folder, ckpt_path, int(epochs), **strategy(ranks, parts=kind == "parts"))
    found = trainer.lightning_module.losses
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # Leaves without taking the process group apart: gloo aborts there one time in about twenty.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
