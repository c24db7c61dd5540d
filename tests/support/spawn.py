"""Runs a function on several ranks, each a process of its own.

    def two_ranks(folder):  # at the top level of the test file
        trainer = make_trainer(folder, devices=2, strategy="ddp")
        ...
        return trainer.global_step

    def test_both_ranks_train(tmp_path):
        assert spawn(two_ranks, 2, tmp_path) == [4, 4]

The processes are forked from a server that has imported torch and Lightning once.
"""

import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["support.resuming"])  # imports what most need
TESTS = str(Path(__file__).parents[1])

LAUNCHER = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables of a rank, as a launcher sets them."""


class Rank(NamedTuple):
    """How a rank ended.

    exit_code: minus the signal's number for a death; None for one that ran past the timeout.
    outlived: whether a process that it started outlived it.
    output: what it printed.
    result: what the function returned; None where it did not return.
    """

    exit_code: int | None
    outlived: bool
    output: str
    result: Any


def rank_and_size():
    """(rank, number of ranks), for the function that runs; (0, 1) in a test itself."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def spawn(function, ranks, *arguments, timeout=300):
    """What `function(*arguments)` returned on each rank; fails where one of them failed."""
    ended = run_ranks(function, ranks, *arguments, timeout=timeout)
    failed = [rank for rank in ended if rank.exit_code != 0]
    assert not failed, "\n".join(f"exit code {rank.exit_code}:\n{rank.output}" for rank in failed)
    return [rank.result for rank in ended]


def run_ranks(function, ranks, *arguments, timeout=120):
    """How each rank of `function(*arguments)` ended.

    Ranks that run longer are killed, and so are stopped ones once the others have ended.
    """
    # A server of Python 3.11 does not take over sys.path, and ignores what it cannot import.
    path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):
        imports = _server.Process(target=int)  # the first process waits for the server's imports
        imports.start()
        imports.join()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            values = str(rank), str(rank), "0", str(ranks), str(ranks), "127.0.0.1", port
            environment = dict(zip(LAUNCHER, values, strict=True))
            where = function.__module__, sys.modules[function.__module__].__file__
            where = *where, function.__qualname__
            call = (Path(folder, str(rank)), environment, where, arguments)
            processes.append(_server.Process(target=_run_rank, args=call))
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not all(map(_is_over, processes)):
            time.sleep(0.02)
        return [_ended(process, Path(folder, str(i))) for i, process in enumerate(processes)]


def _run_rank(files, environment, where, arguments):
    os.setsid()  # so that what it starts can be found
    multiprocessing.set_start_method("fork", force=True)  # as in a process of a user's
    os.environ |= environment
    log = os.open(f"{files}.log", os.O_CREAT | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(log, number)
    code = 0
    try:
        result = _function(*where)(*arguments)
        Path(f"{files}.pickle").write_bytes(pickle.dumps(result))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch aborts at times where it takes process groups apart


def _function(module, file, name):
    """A function of tests/support, or of a test file, which has no name to import it by."""
    if module.startswith("support."):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location(module, file)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)


def _is_over(process):
    """Whether a rank has ended, or was stopped by SIGSTOP."""
    if process.exitcode is not None:
        return True
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # ended since
        return False


def _ended(process, files):
    if process.exitcode is None:
        process.kill()
        process.join()
        code = None
    else:
        code = process.exitcode
    result = Path(f"{files}.pickle")
    return Rank(
        code,
        _outlived(process.pid),
        Path(f"{files}.log").read_text(),
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _outlived(pid):
    """Whether the session of a rank still has processes some seconds after it, which it then ends.

    Loading processes look every five seconds whether they are needed.
    """
    until = time.monotonic() + 12
    while time.monotonic() < until:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return True
