"""Runs a script of this folder on gloo ranks, each of which writes rank<n>.json."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_on_ranks(script, folder, *arguments, ranks=2):
    """What each rank wrote. The script gets the folder as its first argument."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [
            *launcher,
            f"--nproc-per-node={ranks}",
            Path(__file__).parent / script,
            folder,
            *arguments,
        ],
        check=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
