"""A sweep: planned runs are started, resumed or left alone, some at a time, to their end."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from lit_diffusion.cli.run_folder import CLAIM, OR_NONE, InUse, latest_config, occupied
from lit_diffusion.lab.compare.jobs import Job, claim, run_jobs
from lit_diffusion.lab.compare.sweep_plan import Planned
from lit_diffusion.signals import EXIT_SAVED, print_error

LOG = "fit.log"
RESUME = f"--ckpt_path={OR_NONE}"
_TAIL = 15


@dataclass
class Sweep:
    """Brings runs to their end, some at a time.

    Attributes:
        saved: whether a fit has saved on a signal; no other is started then.
    """

    runs: Sequence[Planned]
    at_once: int
    saved: bool = field(default=False, init=False)
    _finished: set[str] = field(default_factory=set, init=False)

    def run(self) -> None:
        """Start or resume every run that is not finished, and say what becomes of it."""
        run_jobs(self._jobs(), self.at_once, self._ended)

    @property
    def unfinished(self) -> list[str]:
        """Names of runs that are not finished."""
        return [run.name for run in self.runs if run.name not in self._finished]

    def tally(self) -> str:
        """How many runs are finished."""
        return f"{len(self._finished)} of {len(self.runs)} runs finished"

    def _jobs(self) -> Iterator[Job | None]:
        """What is to be started; None while all that is left is run by other processes."""
        queue, left = deque(self.runs), set[str]()
        while queue and not self.saved:
            run = queue.popleft()
            try:
                job = self._job(run)
            except InUse:
                if run.name in left:
                    yield None
                else:
                    say(f"{run.name} is being run by another process, and is waited for")
                queue.append(run)
                left.add(run.name)
                continue
            if job is not None:
                yield job

    def _job(self, run: Planned) -> Job | None:
        """What starts or resumes a run; None for one that is finished, or cannot go on.

        Raises:
            InUse: where another process runs it.
        """
        log = claim(run.folder / LOG)
        if log is None:
            raise InUse(f"{run.folder / LOG} is being written by another process.")
        with ExitStack() as unless_started:
            unless_started.enter_context(log)
            with occupied(run.folder):  # also a fit that no sweep started has that
                options = self._prepared(run)
            if options is None:
                return None
            unless_started.pop_all()
        program = shutil.which("lit-diffusion", path=Path(sys.executable).parent)
        command = [program or "lit-diffusion", *run.command[1:], *options]
        return Job(run.name, command, log)

    def _prepared(self, run: Planned) -> list[str] | None:
        """Options of a start beside the run's own; None where it is not to be started."""
        try:
            steps = run.steps()
        except ValueError as error:  # a damaged checkpoint is no reason to stop the others
            say(f"{run.name} CANNOT GO ON: {error}")
            return None
        if steps is None:
            if latest_config(run.folder):
                _clear(run.folder)
            say(f"{run.name} starts")
            return []
        if steps >= run.max_steps:
            self._finished.add(run.name)
            say(f"{run.name} was finished before")
            return None
        say(f"{run.name} resumes at step {steps}")
        return [RESUME]

    def _ended(self, job: Job, code: int, seconds: float) -> None:
        self.saved |= code == EXIT_SAVED
        name, took = job.name, timedelta(seconds=round(seconds))
        run = next(run for run in self.runs if run.name == name)
        try:
            steps = run.steps() or 0
        except ValueError as error:  # nor one that was damaged by now
            say(f"{name} ended after {took} with a damaged checkpoint: {error}")
            return
        if steps >= run.max_steps and code == 0:
            self._finished.add(name)
            say(f"{name} finished in {took}; {self.tally()}")
        elif code == EXIT_SAVED:
            say(
                f"{name} saved at step {steps} of {run.max_steps} on a signal, after {took}, to "
                "be started again; nothing else is started"
            )
        else:
            how = f"FAILED with exit code {code}" if code else "STOPPED EARLY"
            log = run.folder / LOG
            say(
                f"{name} {how} after {took}, saved at step {steps} of {run.max_steps}. "
                f"The end of {log}:\n{_tail(log)}"
            )


def _clear(folder: Path) -> None:
    """Remove what a run left that died before its first checkpoint; its log and claim stay."""
    for path in folder.iterdir():
        if path.name not in (LOG, CLAIM):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tail(log: Path) -> str:
    with log.open(errors="replace") as lines:
        return "".join(f"  | {line.rstrip()}\n" for line in deque(lines, _TAIL)).rstrip()


def say(text: str) -> None:
    """Print to a person, with the time."""
    print_error(f"{time.strftime('%H:%M:%S')}  {text}")
