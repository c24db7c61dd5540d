"""Ranks that never end, each with a worker that never has a batch; for on_ranks.py."""

import os
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset


class Endless(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        (Path(sys.argv[1]) / f"worker{os.getpid()}").touch()
        time.sleep(600)


if __name__ == "__main__":
    (Path(sys.argv[1]) / f"rank{os.getpid()}").touch()
    next(iter(DataLoader(Endless(), num_workers=1)))
