"""Runs a script of this folder on gloo ranks, each of which writes rank<n>.json."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def run_on_ranks(script, folder, *arguments, ranks=2):
    """What each rank wrote. The script gets the folder as its first argument.

    Where ranks hang, all their processes write the stacks of their threads to stderr and end.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *launcher,
        f"--nproc-per-node={ranks}",
        Path(__file__).parent / script,
        folder,
        *arguments,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(command, cwd=folder, env=env) as process:
        try:
            code = process.wait(300)
        except BaseException:
            _abort(_tree(process.pid))
            raise
        finally:
            process.kill()
    if code:
        raise subprocess.CalledProcessError(code, command)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _abort(processes):
    """Have each write its stacks; those that are gone meanwhile have nothing to say."""
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGABRT)
            time.sleep(0.5)  # one after the other writes


def _tree(process):
    """A process and all below it, which it would end by itself if they failed first."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended, or there is no /proc
        children = []
    return [process] + [below for child in children for below in _tree(int(child))]
