"""Has the last of several gloo ranks signalled in mid-training; writes how each rank ended."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_diffusion.callbacks import SaveOnSignal
from support.plain_module import PlainModule, loader, make_trainer

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Slow(PlainModule):
    def training_step(self, batch, batch_idx):
        if RANK == 0:
            time.sleep(0.1)
        if RANK == RANKS - 1 and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def main(folder: Path) -> None:
    trainer = make_trainer(
        folder,
        SaveOnSignal(folder),
        devices=RANKS,
        strategy="ddp",
        max_epochs=9,
        enable_checkpointing=True,
    )
    try:
        trainer.fit(Slow(), loader(32 * RANKS))
    except SystemExit as ended:
        found = {"step": ended.step, "code": ended.code, "reached": trainer.global_step}
        (folder / f"rank{RANK}.json").write_text(json.dumps(found))
    os._exit(0)  # torch aborts at times while it takes groups apart


if __name__ == "__main__":
    main(Path(sys.argv[1]))
