"""`lit-diffusion sweep`: every arm of an experiment with every seed, each an ordinary fit."""

import argparse
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from lit_diffusion.commands.arms import arms_of
from lit_diffusion.commands.jobs import Ended, Job, Stopped, claim, run_jobs, threads_each
from lit_diffusion.commands.options import Parser, integers
from lit_diffusion.commands.run_folder import CLAIM, InUse, latest_config, occupied
from lit_diffusion.commands.sweep_plan import Planned, plan
from lit_diffusion.signals import SAVED, heed

LOG = "fit.log"
RESUME = "--ckpt_path=last"
_TAIL = 15


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "sweep",
        """Train every arm of an experiment with every seed, and compare them.

    lit-diffusion sweep CONFIG --arms configs/arms/*.yaml --seeds 0,1,2 --jobs 2
    lit-diffusion sweep CONFIG --arms md.yaml clts.yaml md.yaml+clts.yaml --trainer.max_steps=500

An arm is CONFIG with one or more further configs, joined by +; its name is theirs. CONFIG alone is
the arm baseline; an arm with the settings of one before it is left out. Each run is an ordinary
`lit-diffusion fit` into OUT/<arm>/seed-<n>, with its output in fit.log there; options that are not
listed below go to every fit. All arms of the first seed come first, so that a sweep that is cut
short can be compared.

The same command goes on where it was stopped: finished runs are left alone, others resume from
their last checkpoint, or start over where there is none yet; those that another process runs are
waited for. At the end, or at any time: `lit-diffusion compare OUT --out OUT/report`.

On a cluster, each line of --print is an array task, which resumes when it is requeued:

    lit-diffusion sweep CONFIG --arms ... --print > commands
    sbatch --array=1-$(wc -l < commands) configs/cluster/array.sbatch commands""",
    )
    made.add_argument("config", metavar="CONFIG", help="config of the experiment")
    made.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="configs that are added to CONFIG"
    )
    made.add_argument(
        "--seeds", type=integers, default=[0, 1, 2], metavar="0,1,2", help="default 0,1,2"
    )
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    made.add_argument("--out", metavar="DIR", help="default runs/<name of CONFIG>-sweep")
    made.add_argument(
        "--print", action="store_true", help="print the commands, one a line, and run nothing"
    )
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "sweep", then options.

    Raises:
        ValueError: for options, arms or existing runs that do not fit; nothing is started then.
        SystemExit: 75 where a fit has saved on a signal, to be started again; 1 where runs are left
            that are not finished, or cannot be compared.
    """
    args, options = parser().parse_known_args(argv[1:])
    runs = planned(args, options)
    if args.print:
        print("\n".join(shlex.join([*run.command, RESUME]) for run in runs))
        return
    sweep = Sweep(runs, args.jobs)
    try:
        sweep.run()
    except KeyboardInterrupt as end:
        _tell_stopped(sweep, argv)
        if isinstance(end, Stopped):
            raise SystemExit(SAVED if sweep.saved else 128 + end.signal) from end
        raise
    if sweep.saved:
        _tell_stopped(sweep, argv)
        raise SystemExit(SAVED)
    heed()
    if sweep.unfinished:
        _tell(f"{sweep.tally()}; not {', '.join(sweep.unfinished)}")
    if not _reported(runs, _out(args)) or sweep.unfinished:
        raise SystemExit(1)


def planned(args: argparse.Namespace, options: Sequence[str]) -> list[Planned]:
    """All runs of a command line.

    Args:
        args: of `parser`.
        options: for every fit.

    Raises:
        ValueError: for options, arms or existing runs that do not fit.
    """
    _check(args)
    return plan(arms_of(args.config, args.arms), args.seeds, _out(args), options, _tell)


def _tell_stopped(sweep: "Sweep", argv: Sequence[str]) -> None:
    again = shlex.join(["lit-diffusion", *argv])
    _tell(f"stopped with {sweep.tally()}. The same command goes on:\n  {again}")


def _reported(runs: Sequence[Planned], out: Path) -> bool:
    """Compare the arms; whether that is possible, or there is nothing to compare."""
    from lit_diffusion.commands.compare import run as compare

    if len({run.arm for run in runs}) == 1:
        return True
    try:
        compare(["compare", str(out), "--out", str(out / "report")])
    except ValueError as error:
        _tell(f"no report: {error}")
        return False
    return True


@dataclass
class Sweep:
    """Brings runs to their end, some at a time.

    Args:
        runs: in order.
        at_once: processes at a time.

    Attributes:
        saved: whether a fit has saved on a signal; no other is started then.
    """

    runs: Sequence[Planned]
    at_once: int
    saved: bool = field(default=False, init=False)
    _finished: set[str] = field(default_factory=set, init=False)

    def run(self) -> None:
        """Start or resume every run that is not finished, and say what becomes of it."""
        threads = {"OMP_NUM_THREADS": str(threads_each(self.at_once))}
        run_jobs(self._jobs(), self.at_once, self._ended, threads | dict(os.environ))

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
                    _tell(f"{run.name} is being run by another process, and is waited for")
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
        return Job(run.name, [_program(), *run.command[1:], *options], log)

    def _prepared(self, run: Planned) -> list[str] | None:
        """Options of a start beside the run's own; None where it is not to be started."""
        try:
            steps = run.steps()
        except ValueError as error:  # a damaged checkpoint is no reason to stop the others
            _tell(f"{run.name} CANNOT GO ON: {error}")
            return None
        if steps is None:
            if latest_config(run.folder):
                _clear(run.folder)
            _tell(f"{run.name} starts")
            return []
        if steps >= run.max_steps:
            self._finished.add(run.name)
            _tell(f"{run.name} was finished before")
            return None
        _tell(f"{run.name} resumes at step {steps}")
        return [RESUME]

    def _ended(self, ended: Ended) -> None:
        name, code = ended.job.name, ended.code
        self.saved |= code == SAVED
        run = next(run for run in self.runs if run.name == name)
        seconds = timedelta(seconds=round(ended.seconds))
        try:
            steps = run.steps() or 0
        except ValueError as error:  # nor one that was damaged by now
            _tell(f"{name} ended after {seconds} with a damaged checkpoint: {error}")
            return
        if steps >= run.max_steps and code == 0:
            self._finished.add(name)
            _tell(f"{name} finished in {seconds}; {self.tally()}")
            return
        if code == SAVED:
            _tell(
                f"{name} saved at step {steps} of {run.max_steps} on a signal, after {seconds}, to "
                "be started again; nothing else is started"
            )
            return
        how = f"FAILED with exit code {code}" if code else "STOPPED EARLY"
        log = run.folder / LOG
        _tell(
            f"{name} {how} after {seconds}, saved at step {steps} of {run.max_steps}. "
            f"The end of {log}:\n{_tail(log)}"
        )


def _check(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}.")
    in_range = all(0 <= seed < 2**32 for seed in args.seeds)  # as seed_everything has it
    if not in_range or len(set(args.seeds)) < len(args.seeds):
        raise ValueError(
            f"--seeds must be different numbers from 0 to {2**32 - 1}, got {args.seeds}."
        )


def _out(args: argparse.Namespace) -> Path:
    return Path(args.out) if args.out else Path("runs") / f"{Path(args.config).stem}-sweep"


def _clear(folder: Path) -> None:
    """Remove what a run left that died before its first checkpoint; its log and claim stay."""
    for path in folder.iterdir():
        if path.name not in (LOG, CLAIM):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _program() -> str:
    """The console script of this environment."""
    beside = Path(sys.executable).with_name("lit-diffusion")
    return str(beside) if beside.is_file() else "lit-diffusion"


def _tail(log: Path) -> str:
    with log.open(errors="replace") as lines:
        return "".join(f"  | {line.rstrip()}\n" for line in deque(lines, _TAIL)).rstrip()


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
