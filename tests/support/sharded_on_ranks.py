"""Fits with split weights on gloo ranks, saves, and writes the losses of each rank."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.sharded import fit, strategy


def main(folder: Path, epochs: int, ckpt_path: str | None = None) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    trainer, reference = fit(folder, ckpt_path, epochs, **strategy(ranks))
    trainer.save_checkpoint(folder / "end.ckpt")
    if trainer.is_global_zero and not ckpt_path:
        reference.assert_saved(folder / "end.ckpt")
        assert reference.validations == epochs
    found = {"rank": trainer.global_rank, "losses": trainer.lightning_module.losses}
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
