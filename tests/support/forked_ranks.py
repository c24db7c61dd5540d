"""Runs a function on several ranks, each a process forked from one that has imported all of it.

    with Forker() as forker:
        ends = forker.run("support.failing_ranks:main", folder, 3, "kill", limit=60)

Ranks are told apart by the environment variables that a launcher would set. What takes seconds, to
import torch and Lightning, happens once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
SIZE = "NUMBER_OF_RANKS"


def place():
    """(rank, number of ranks), for the function that is run."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ[SIZE])


class End(NamedTuple):
    """How a rank ended.

    code: exit code, minus the signal's number for a death, None for one that ran past the limit.
    left: whether a process that it started outlived it.
    said: its output.
    """

    code: int | None
    left: bool
    said: str


class Forker:
    """Starts the process that forks; ends it with the context."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, function, folder, world_size, *arguments, limit=120):
        """The ends of all ranks of `function(folder, *arguments)`, killed after `limit` seconds."""
        request = [function, str(folder), world_size, arguments, limit]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        ends = json.loads(self._process.stdout.readline())
        logs = [(folder / f"rank{rank}.log").read_text() for rank in range(world_size)]
        return [End(*end, said) for end, said in zip(ends, logs, strict=True)]

    def results(self, function, folder, world_size, *arguments, limit=120):
        """What each rank wrote to rank<n>.json, when all have ended well."""
        ends = self.run(function, folder, world_size, *arguments, limit=limit)
        assert [end.code for end in ends] == [0] * world_size, "\n".join(end.said for end in ends)
        return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world_size)]


def _run(function, folder, world_size, arguments, limit):
    module, name = function.split(":")
    call = getattr(import_module(module), name)  # imported before the fork
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    pids = []
    for rank in range(world_size):
        if (pid := os.fork()) == 0:
            place = {"LOCAL_RANK": str(rank), SIZE: str(world_size)}
            _become_rank(call, Path(folder), arguments, {**address, **place})
        pids.append(pid)
    codes = _wait(pids, time.monotonic() + limit)
    return [(code, _outlived(pid)) for pid, code in zip(pids, codes, strict=True)]


def _become_rank(call, folder, arguments, environment):
    os.setsid()  # so that what it starts can be found
    os.environ |= environment
    log = os.open(folder / f"rank{environment['LOCAL_RANK']}.log", os.O_CREAT | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(log, number)
    code = 0
    try:
        call(folder, *arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids, deadline):
    """Exit codes; None for those that had to be killed."""
    codes = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


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


def serve():
    """Answer requests, a line each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    import_module("support.resuming")  # torch, Lightning and what most need
    serve()
