"""python fid_on_processes.py PROCESSES FOLDER: evaluate 10 samples and 2, on several processes."""

import json
import os
import sys
from pathlib import Path

from lit_diffusion.callbacks.fid import FIDEvaluation
from support.pixels import PixelProtocol
from support.rising import Rising, loader, trainer


class Watched(Rising):
    """Notes the seeds and calls of the last validation."""

    def on_validation_start(self):
        self.seeds.clear()
        self.levels.clear()


def evaluation(num_samples, folder):
    return FIDEvaluation(
        num_samples,
        PixelProtocol([]),
        weights="raw",
        batch_size=3,
        save_best=num_samples == 10,
        cache_dir=str(folder / "cache"),
    )


def main():
    processes, folder = int(sys.argv[1]), Path(sys.argv[2])
    module = Watched(best=2)
    options = {"strategy": "ddp", "devices": processes} if processes > 1 else {}
    callbacks = [evaluation(10, folder), evaluation(2, folder)]
    run = trainer(folder, callbacks, max_epochs=2, limit_train_batches=2, **options)
    run.fit(module, loader(12), loader(31, seed=1))
    scored = [seed for seed in module.seeds if seed % run.world_size == run.global_rank]
    found = {"scored": scored, "calls": len(module.levels)}
    (folder / f"rank-{run.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    os._exit(0)  # torch aborts at times while it takes groups apart
