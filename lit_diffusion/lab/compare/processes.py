"""Run processes in parallel, each with a log file, and stop them together."""

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

from lit_diffusion.cli.run_folder import InUse
from lit_diffusion.files import check_regular
from lit_diffusion.signals import InterruptedBySignal, SignalRecorder

PATIENCE = 30.0
"""Seconds between SIGTERM and SIGKILL when processes are stopped."""


@dataclass(frozen=True)
class Job:
    """A process to start. Its output is appended to `log`, a file from `claim_log`."""

    name: str
    command: Sequence[str]
    log: IO[bytes]


OnEnd = Callable[[Job, int, float], None]
"""Called with an ended job, its exit status (negative if a signal ended it), and its seconds."""


def claim_log(path: Path) -> IO[bytes]:
    """Open a log for appending, with an exclusive lock.

    The child process that writes the log inherits the lock and holds it until the child ends.
    Therefore no second process can start with the same log, even if the parent process was killed.

    On a file system without locks, the log is opened without a lock.

    Raises:
        InUse: if another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        check_regular(path)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise InUse(f"{path} is being written by another process.") from None
    except OSError:  # a file system without locks, about which `occupied` warns
        pass
    return file


def run_jobs(jobs: Iterable[Job | None], at_once: int, on_end: OnEnd) -> None:
    """Run all jobs in parallel processes, and stop them if this process is interrupted or signaled.

    In each process, OMP_NUM_THREADS is set to the number of cores divided by `at_once`, unless it
    is set already.

    Batch systems send a SIGUSR1 shortly before the time limit of a job. If this process gets a
    SIGUSR1, it sends a SIGUSR1 to the running processes, and waits until they end. If this process
    gets a Ctrl-C, SIGTERM or SIGHUP, it sends a SIGTERM to the running processes, and a SIGKILL
    after `PATIENCE` seconds. Signals that this process ignores, for example under nohup, stay
    ignored.

    Args:
        jobs: iterator over jobs. The next job is requested whenever fewer than `at_once` processes
            run. If no job is ready, the iterator yields None, and is asked again after a short
            wait.
        at_once: maximum number of parallel processes, >= 1.
        on_end: function that is called for each process that has ended or was stopped.

    Raises:
        KeyboardInterrupt: if this process was interrupted.
        InterruptedBySignal: if this process got a signal. This is a subclass of KeyboardInterrupt.
    """
    queue, running = iter(jobs), dict[subprocess.Popen[bytes], tuple[Job, float]]()

    def close(process: subprocess.Popen[bytes]) -> None:
        job, start = running.pop(process)
        job.log.close()
        on_end(job, process.returncode, time.monotonic() - start)

    recorder = SignalRecorder((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    recorder.start()
    try:
        has_jobs = True
        while recorder.received is None and (has_jobs or running):
            while has_jobs and len(running) < at_once:
                try:
                    job = next(queue)
                except StopIteration:
                    has_jobs = False
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
        start_new_session=True,  # Ctrl-C reaches only this process, which stops the others
    )


def _stop(processes: Collection[subprocess.Popen[bytes]], received: signal.Signals | None) -> None:
    """Signal all process groups to stop, wait, and kill those that remain."""
    is_announced = received == signal.SIGUSR1  # then the batch system sets the time limit
    _signal_all(processes, signal.SIGUSR1 if is_announced else signal.SIGTERM)
    deadline = time.monotonic() + (math.inf if is_announced else PATIENCE)
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also after a second Ctrl-C
        _signal_all(processes, signal.SIGKILL)
        for process in processes:
            process.wait()


def _signal_all(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
