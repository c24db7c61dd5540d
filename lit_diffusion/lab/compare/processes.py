"""Processes side by side: at most so many at a time, each with its log file, stopped together."""

import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lit_diffusion.signals import InterruptedBySignal, SignalRecorder

PATIENCE = 30.0
"""Seconds that a process may take to stop after SIGTERM, before it is killed."""


@dataclass(frozen=True)
class Job:
    """A process to be started, whose output is appended to a claimed file."""

    name: str
    command: Sequence[str]
    log: IO[bytes]


OnEnd = Callable[[Job, int, float], None]
"""Called with a job that ended, its exit status (negative for a signal) and its seconds."""


def claim_log(path: Path) -> IO[bytes] | None:
    """Open a log for appending, for one process in the world at a time.

    The claim is inherited by the process that writes the log and ends with it, so that a process
    whose parent was killed is not joined by a second one.

    Returns:
        The file, or None where another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def run_jobs(jobs: Iterable[Job | None], at_once: int, on_end: OnEnd) -> None:
    """Run all jobs, and stop those that run if this process is interrupted or signalled.

    Each gets its share of the cores as OMP_NUM_THREADS, where that is not set already.

    SIGUSR1, by which batch systems announce the end of a job, is passed on, and the processes may
    take the time that they need. On other signals they get a SIGTERM. Ignored ones (nohup) stay
    ignored.

    Args:
        jobs: the next one is taken whenever there is room for it; after a None again soon.
        at_once: processes at a time, >= 1.
        on_end: called for each process that has ended, by itself or stopped.

    Raises:
        KeyboardInterrupt: if this process was interrupted; its subclass
            `InterruptedBySignal` if it was signalled.
    """
    waiting, running = iter(jobs), dict[subprocess.Popen[bytes], tuple[Job, float]]()

    def close(process: subprocess.Popen[bytes]) -> None:
        job, start = running.pop(process)
        job.log.close()
        on_end(job, process.returncode, time.monotonic() - start)

    recorder = SignalRecorder((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    recorder.start()
    try:
        is_waiting = True
        while recorder.received is None and (is_waiting or running):
            while is_waiting and len(running) < at_once:
                try:
                    job = next(waiting)
                except StopIteration:
                    is_waiting = False
                    break
                if job is None:
                    break
                running[_start(job, at_once)] = job, time.monotonic()
            for process in [process for process in running if process.poll() is not None]:
                close(process)
            time.sleep(0.1)
        if recorder.received is not None:
            raise InterruptedBySignal(recorder.received)
    finally:
        _stop(running, recorder.received)
        recorder.stop()
        for process in list(running):
            close(process)


def _start(job: Job, at_once: int) -> subprocess.Popen[bytes]:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return subprocess.Popen(  # noqa: S603  the command is ours
        job.command,
        stdin=subprocess.DEVNULL,
        stdout=job.log,
        stderr=subprocess.STDOUT,
        env={"OMP_NUM_THREADS": str(max(1, cores // at_once))} | dict(os.environ),
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )


def _stop(processes: Collection[subprocess.Popen[bytes]], received: signal.Signals | None) -> None:
    """Ask all to stop, with the processes that they started; kill what is left after a while."""
    is_announced = received == signal.SIGUSR1  # then the batch system has the patience
    _signal_all(processes, signal.SIGUSR1 if is_announced else signal.SIGTERM)
    deadline = time.monotonic() + (math.inf if is_announced else PATIENCE)
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # a second Ctrl-C ends the patience
        _signal_all(processes, signal.SIGKILL)
        for process in processes:
            process.wait()


def _signal_all(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
