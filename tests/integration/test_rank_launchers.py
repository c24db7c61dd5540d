"""Ranks that fail in a real `lit-diffusion fit`, under Lightning's own launcher and torchrun."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.commands import SCRIPT
from support.small_digits import small_digits
from support.tiny_run import spec, write_config

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.usefixtures("folder")]

LIMIT = 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = {"lightning": [SCRIPT], "torchrun": [*TORCHRUN, SCRIPT]}


def config(way, rank, timeout):
    contents = small_digits(200, devices=2, strategy="ddp", enable_progress_bar=False)
    callbacks = contents["trainer"]["callbacks"]
    callbacks.append(spec("support.failing_ranks.FailAt", way=way, rank=rank))
    if timeout is not None:
        callbacks.insert(0, spec("lit_diffusion.callbacks.RankWatch", timeout=timeout))
    return write_config(contents, Path("digits.yaml").resolve())


def fit(launcher, way, rank, timeout=None):
    """Exit code, output, and processes that were left behind."""
    command = [*LAUNCHERS[launcher], "fit", "--config", config(way, rank, timeout)]
    with Path("log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--trust=support"],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            code = process.wait(timeout=LIMIT)
            left = _still_there()
        finally:
            for pid in _processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return code, Path("log").read_text(), left


def _still_there():
    """Processes of this fit that have not ended within some seconds, in whatever session."""
    until = time.monotonic() + 15
    while (left := _processes()) and time.monotonic() < until:
        time.sleep(0.2)
    return list(left.values())


def _processes():
    """{id: command} of those that were given the config of this folder."""
    table = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True)
    rows = [row.split(None, 1) for row in table.stdout.splitlines()]
    return {int(pid): command for pid, command in rows if str(Path.cwd()) in command}


@pytest.mark.parametrize(("launcher", "rank"), [("lightning", 1), ("torchrun", 0)])
def test_a_rank_that_is_killed_ends_a_fit_with_its_name(launcher, rank):
    code, output, left = fit(launcher, "kill", rank)
    assert code not in (0, 2)
    if launcher == "lightning" and code == -signal.SIGKILL:
        # Lightning looks at its children every 5 s. If it looks before rank 0 has reported, it
        # names the rank itself and kills rank 0, which can then print nothing.
        assert f"[rank: {rank}] Child process with PID" in output
    else:
        # Instead of the error of the connection, which the other ranks were about to report.
        assert f"lit-diffusion fit: rank {rank} was last heard of at step" in output
    assert left == []


@pytest.mark.parametrize(
    ("launcher", "way", "rank", "message"),
    [
        ("lightning", "stop", 1, "was last heard of at step"),  # killed by its launcher
        ("torchrun", "sleep", 0, "has kept the others waiting for"),
    ],
)
def test_a_rank_that_hangs_ends_a_fit_with_its_name(launcher, way, rank, message):
    code, output, left = fit(launcher, way, rank, timeout=4.0)
    assert code not in (0, 2)
    assert f"rank {rank} {message}" in output
    assert left == []
