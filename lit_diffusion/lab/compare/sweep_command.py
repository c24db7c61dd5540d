"""`lit-diffusion sweep`: every arm of an experiment with every seed, each an ordinary fit."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, integers
from lit_diffusion.lab.compare.arms import arm_files
from lit_diffusion.lab.compare.command import run as compare
from lit_diffusion.lab.compare.sweep_plan import Planned, plan
from lit_diffusion.lab.compare.sweeping import RESUME, Sweep, say
from lit_diffusion.signals import EXIT_SAVED, InterruptedBySignal, redeliver_signal


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
    stopped = f"The same command goes on:\n  {shlex.join(['lit-diffusion', *argv])}"
    try:
        sweep.run()
    except KeyboardInterrupt as end:
        say(f"stopped with {sweep.tally()}. {stopped}")
        if sweep.saved and isinstance(end, InterruptedBySignal):
            raise SystemExit(EXIT_SAVED) from end
        raise
    if sweep.saved:
        say(f"stopped with {sweep.tally()}. {stopped}")
        raise SystemExit(EXIT_SAVED)
    redeliver_signal()
    if sweep.unfinished:
        say(f"{sweep.tally()}; not {', '.join(sweep.unfinished)}")
    if not _reported(runs, _out(args)) or sweep.unfinished:
        raise SystemExit(1)


def planned(args: argparse.Namespace, options: Sequence[str]) -> list[Planned]:
    """All runs of a command line; options, arms and existing runs have to fit."""
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}.")
    in_range = all(0 <= seed < 2**32 for seed in args.seeds)  # as seed_everything has it
    if not in_range or len(set(args.seeds)) < len(args.seeds):
        raise ValueError(
            f"--seeds must be different numbers from 0 to {2**32 - 1}, got {args.seeds}."
        )
    return plan(arm_files(args.config, args.arms), args.seeds, _out(args), options, say)


def _out(args: argparse.Namespace) -> Path:
    return Path(os.path.expanduser(args.out or f"runs/{Path(args.config).stem}-sweep"))


def _reported(runs: Sequence[Planned], out: Path) -> bool:
    if len({run.arm for run in runs}) == 1:
        return True
    try:
        compare(["compare", str(out), "--out", str(out / "report")])
    except ValueError as error:
        say(f"no report: {error}")
        return False
    return True
