"""`lit-diffusion sweep`: train every arm of an experiment with every seed.

Each run is an ordinary `lit-diffusion fit`. All runs are planned and checked before the first one
starts. Then they are processed, a limited number in parallel: new runs start, interrupted runs
resume, and finished runs are skipped. To continue a stopped sweep, repeat the command.
"""

import io
import itertools
import logging
import reprlib
import shlex
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.cli.options import Parser, check_exists, integer, integers, require_lab
from lit_diffusion.cli.run_folder import (
    CLAIM,
    FIRST_SAVE,
    OR_NONE,
    InUse,
    latest_config,
    occupied,
    read_config,
)
from lit_diffusion.files import check_regular, is_checkpoint, path_after_replace, remove
from lit_diffusion.lab.compare.command import run as compare
from lit_diffusion.lab.compare.processes import Job, claim_log, run_jobs
from lit_diffusion.signals import EXIT_SAVED, InterruptedBySignal, print_error, redeliver_signal

LAST = Path("checkpoints", "last.ckpt")
"""Path, in a run folder, of the checkpoint to resume from."""

LOG = "fit.log"
RESUME = f"--ckpt_path={OR_NONE}"
BASELINE = "baseline"
"""Name of the arm that uses only the experiment's config."""

_IGNORED_SETTINGS = ("ckpt_path", "weights_only", "trainer.default_root_dir")
"""Settings that may change when a run resumes."""

_REPLACED_SETTINGS = (
    ("model.image_shape", "data"),
    ("model.num_classes", "data"),
    ("model.network.num_classes", None),
)
"""(name, new value) of settings that `fit` replaces with settings of the data or of the module."""


def parser() -> Parser:
    """Build the parser of the command."""
    parser = Parser(
        "sweep",
        """Train every arm of an experiment with every seed, and compare them.

    lit-diffusion sweep CONFIG --arms configs/arms/*.yaml --seeds 0,1,2 --jobs 2
    lit-diffusion sweep CONFIG --arms md.yaml clts.yaml md.yaml+clts.yaml --trainer.max_steps=500

CONFIG is one or more configs, as for fit. An arm is CONFIG plus one or more further configs, joined
by +. The names of these further configs are the name of the arm. CONFIG alone is the arm
"baseline". An arm with the same settings as an earlier arm is left out. Of configs joined by +,
later ones override earlier ones: the command prints what they override, and raises an error if
nothing of an earlier one is left. Each run is an ordinary `lit-diffusion fit` into
OUT/<arm>/seed-<n>, with its output in fit.log in this folder. Options that are not listed below are
passed to every fit. All arms run with the first seed before any arm runs with the second, so you
can compare arms even if you stop the sweep early.

To continue a stopped sweep, run the same command again. Finished runs are skipped. Others resume
from their last checkpoint, or start again if they have none. The command waits for runs of other
processes. To compare the runs, at the end or at any time, run
`lit-diffusion compare OUT --out OUT/report`.

On a cluster, use each line of --print as an array task, which resumes when it is requeued:

    lit-diffusion sweep CONFIG --arms ... --print > commands
    sbatch --array=1-$(wc -l < commands) configs/cluster/array.sbatch commands""",
    )
    add = parser.add_argument
    # One list, in the order of the command line, because later configs win.
    text = "configs of the experiment"
    add("configs", nargs="*", action="extend", default=[], metavar="CONFIG", help=text)
    add("-c", "--config", dest="configs", action="append", metavar="CONFIG", help="same as CONFIG")
    text = "configs to add to CONFIG, one arm for each (default: the baseline alone)"
    add("--arms", nargs="+", default=[], metavar="ARM", help=text)
    add("--seeds", type=integers, default=[0, 1, 2], metavar="0,1,2", help="default 0,1,2")
    add("--jobs", type=integer, default=1, metavar="N", help="number of parallel runs (default 1)")
    add("--out", metavar="DIR", help="folder of the sweep (default runs/<name of CONFIG>-sweep)")
    add("--print", action="store_true", help="print one command per line, and run nothing")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ValueError: if options, arms or existing runs are invalid. No run is started then.
        SystemExit: with code 75 if a signal made a fit save a checkpoint and end, or with code 1 if
            runs are unfinished or cannot be compared. After code 75, start the command again to
            continue the sweep.
    """
    args, options = parser().parse_known_args(argv[1:])
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}.")
    if not args.configs:
        raise ValueError("needs CONFIG, such as configs/digits.yaml.")
    check_exists("config", *args.configs)
    out = Path(args.out or f"runs/{Path(args.configs[0]).stem}-sweep")
    runs = plan_sweep(args.configs, args.arms, args.seeds, out, options)
    if args.print:
        print("\n".join(shlex.join([*run.command, RESUME]) for run in runs))
        return
    has_arms = len({run.arm for run in runs}) > 1
    if has_arms:
        require_lab()  # raises before hours of training, not after them
    sweep, interrupt = Sweep(runs, args.jobs), None
    try:
        sweep.run()
    except KeyboardInterrupt as error:
        interrupt = error
    if interrupt or sweep.saved:
        print_status(
            f"stopped with {sweep.tally()}. To continue, run the same command:\n"
            f"  {shlex.join(['lit-diffusion', *argv])}"
        )
        if interrupt and not (sweep.saved and isinstance(interrupt, InterruptedBySignal)):
            raise interrupt
        raise SystemExit(EXIT_SAVED) from interrupt
    redeliver_signal()
    unfinished = [run.name for run in runs if run not in sweep.finished]
    if unfinished:
        print_status(f"{sweep.tally()}; unfinished: {', '.join(unfinished)}")
    is_compared = not has_arms or _write_report(out)
    if unfinished or not is_compared:
        raise SystemExit(1)


def _write_report(out: Path) -> bool:
    """Write the report of a sweep. Returns whether the arms could be compared."""
    try:
        compare(["compare", str(out), "--out", str(out / "report")])
    except ValueError as error:
        print_status(f"no report: {error}")
        return False
    return True


def print_status(text: str) -> None:
    """Print to stderr with a timestamp."""
    print_error(f"{time.strftime('%H:%M:%S')}  {text}")


# The plan


@dataclass(frozen=True)
class PlannedRun:
    """A fit of one arm with one seed. It is finished after `max_steps` optimizer steps."""

    arm: str
    seed: int
    folder: Path
    options: tuple[str, ...]
    max_steps: int

    @property
    def name(self) -> str:
        """Arm and seed, for messages."""
        return f"{self.arm}/seed-{self.seed}"

    @property
    def command(self) -> list[str]:
        """The command line that starts the run."""
        return ["lit-diffusion", "fit", *self.options]

    def completed_steps(self) -> int | None:
        """Number of steps at the last checkpoint; None if the run must start from scratch.

        The checkpoints of a finished run may have been deleted. For a finished run without a
        checkpoint, the result is therefore the last step in metrics.csv or in the evaluations.
        """
        from lit_diffusion.checkpoints.reading import read_checkpoint

        file = path_after_replace(self.folder / LAST)
        if file.exists():
            return int(read_checkpoint(file, shapes_only=True)["global_step"])
        last = max(_last_evaluation(self.folder), _logged_batches(self.folder))
        return last if last >= self.max_steps else None


def plan_sweep(
    experiment: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    options: Sequence[str] = (),
) -> list[PlannedRun]:
    """Plan and check all runs of a sweep, in the order of their seeds.

    The arguments are those of the command `lit-diffusion sweep`. `experiment` lists the config
    files that all arms share. Every fit gets the `options`.

    Raises:
        ValueError: if options or configs are invalid, or if the folder of a planned run contains a
            run with other settings.
    """
    if not all(0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be different numbers from 0 to {2**32 - 1}, got {seeds}.")
    configs = arm_configs(experiment, arms)
    check_exists("arm file", *(f for files in configs.values() for f in files[len(experiment) :]))
    settings = {arm: fit_settings(arm, files, options) for arm, files in configs.items()}
    names = []
    for arm in configs:
        # A duplicate arm shows nothing, and its test would reduce the power of the other tests.
        original = next(each for each in configs if settings[each] == settings[arm])
        if original == arm:
            names.append(arm)
            _report_overridden(arm, configs[arm], len(experiment), options, settings[arm])
        else:
            print_status(f"arm {arm} is left out: its settings equal the settings of {original}")
    runs = []
    for seed, arm in itertools.product(seeds, names):
        folder = out / arm / f"seed-{seed}"
        _refuse_other_run(folder, settings[arm] | {"seed_everything": seed})
        files = [f"--config={file}" for file in configs[arm]]
        run_options = (f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}")
        max_steps = settings[arm]["trainer"]["max_steps"]
        runs.append(PlannedRun(arm, seed, folder, (*files, *options, *run_options), max_steps))
    return runs


def arm_configs(experiment: Sequence[str], arms: Sequence[str]) -> dict[str, list[str]]:
    """Map the name of each arm to its config files. The arguments are those of `plan_sweep`.

    The baseline, which is named BASELINE, uses only the config files of the experiment. Every other
    arm adds its own files.

    Raises:
        ValueError: if two arms have the same name, or if an arm lists a file twice.

    Example:
        >>> arm_configs(["run.yaml"], ["arms/md.yaml", "arms/md.yaml+clts.yaml"])["md+clts"]
        ['run.yaml', 'arms/md.yaml', 'clts.yaml']
    """
    configs = {BASELINE: [*experiment]}
    for arm in arms:
        files = [arm] if Path(arm).is_file() else arm.split("+")
        name = "+".join(Path(file).stem for file in files)
        if name in configs:
            raise ValueError(f"two arms are named {name}; rename {arm}: folders need unique names.")
        configs[name] = [*experiment, *files]
        counts = Counter(Path(file).resolve() for file in configs[name])
        if repeats := [path.name for path, count in counts.items() if count > 1]:
            raise ValueError(
                f"arm {name} has {repeats[0]} twice, which would add its callbacks twice; pass it "
                "once."
            )
    return configs


def fit_settings(arm: str, files: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return all settings of the fit of an arm, with defaults.

    Raises:
        ValueError: if the settings are invalid for a fit or for a sweep. The message names the arm.
    """
    from lit_diffusion.cli.fit import run as run_fit

    stdout, configs = io.StringIO(), [f"--config={file}" for file in files]
    try:
        with redirect_stdout(stdout), suppress(SystemExit):
            run_fit(["fit", *configs, *options, "--print_config"])
        settings: dict[str, Any] | None = yaml.safe_load(stdout.getvalue())
        if settings is None:
            raise ValueError(
                "`fit` prints no settings with these options; leave out options that print help."
            )
        trainer = settings["trainer"]
        if trainer["max_steps"] < 1:
            raise ValueError(
                "runs end after trainer.max_steps optimizer steps, got "
                f"{trainer['max_steps']}; set trainer.max_steps."
            )
        if trainer["enable_checkpointing"] is False or trainer["fast_dev_run"]:
            raise ValueError(
                "runs are resumed from checkpoints; leave out trainer.enable_checkpointing=false "
                "and trainer.fast_dev_run."
            )
        if (checkpoint := settings["ckpt_path"]) is not None:
            raise ValueError(f"runs start from scratch; leave out ckpt_path={checkpoint}.")
    except ValueError as error:
        raise ValueError(f"arm {arm}: {error}") from error
    return settings


def _report_overridden(
    arm: str,
    files: Sequence[str],
    num_shared: int,
    options: Sequence[str],
    settings: dict[str, Any],
) -> None:
    """Print which settings of an arm's configs are overridden by later configs of the arm.

    Args:
        arm: name of the arm.
        files: configs of the arm, of which the first `num_shared` are those of the experiment.
        num_shared: number of configs of the experiment.
        options: options of every fit.
        settings: settings of the arm.

    Raises:
        ValueError: if a config has no effect, because later configs override all that it sets. The
            name of the arm would be misleading.
    """

    def settings_of(files: Sequence[str]) -> dict[str, Any] | None:
        logging.disable(logging.INFO)  # messages about configs that are not those of the arm
        try:
            return fit_settings(arm, files, options)
        except ValueError:  # configs may not fit in another order
            return None
        finally:
            logging.disable(logging.NOTSET)

    for i in range(num_shared, len(files) - 1):
        if (if_last := settings_of([*files, files[i]])) == settings:
            continue  # all that it sets applies
        name = Path(files[i]).name
        if settings_of([*files[:i], *files[i + 1 :]]) == settings:
            raise ValueError(
                f"arm {arm}: {name} has no effect, because later configs override all that it "
                "sets; leave it out, or put it last."
            )
        overridden = ["settings"]
        if if_last is not None:
            overridden = [
                key
                for key, (old, new) in _changes(settings, if_last).items()
                if not (  # appended callbacks are only repeated
                    isinstance(old, list)
                    and isinstance(new, list)
                    and all(isinstance(each, dict) and each in old for each in new)
                )
            ]
        if overridden:
            print_status(f"arm {arm}: later configs override {', '.join(overridden)} of {name}")


def _changes(saved: dict[str, Any], used: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a fit that differ, as {dotted name: (saved value, used value)}."""
    from lit_diffusion.cli.changed_settings import differences

    changes: dict[str, tuple[Any, Any]] = {}
    for key in sorted(saved.keys() | used.keys()):
        changes |= differences(saved.get(key), used.get(key), key)
    return changes


def _refuse_other_run(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds a run with other settings or without its checkpoint."""
    config = latest_config(folder)
    saved = settings if config is None else read_config(config)
    if listed := [
        f"{key} was {reprlib.repr(old)}, is {reprlib.repr(new)}"
        for key, (old, new) in _changes(saved, settings).items()
        if key not in _IGNORED_SETTINGS and (key, new) not in _REPLACED_SETTINGS
    ]:
        raise ValueError(
            f"{folder} contains a run with other settings: {'; '.join(listed)}. Restore them, "
            "choose another --out, or delete that folder."
        )
    if is_checkpoint(path_after_replace(folder / LAST)):
        return
    # rglob does not enter links to folders.
    if rest := sorted([*folder.glob("checkpoints/*.ckpt"), *folder.rglob("*.ckpt")]):
        raise ValueError(f"{folder} has {rest[0].name}, but no {LAST}: move or delete that folder.")
    # A fit that was killed before its first checkpoint may have some rows. If there are more rows,
    # the checkpoint was deleted. Rows count batches, and a GAN has fewer batches than steps, so
    # a GAN with fewer rows than max_steps may be finished.
    evaluated, batches = _last_evaluation(folder), _logged_batches(folder)
    step = max(evaluated, batches if batches > 2 * FIRST_SAVE else 0)
    if 0 < step < settings["trainer"]["max_steps"]:
        raise ValueError(
            f"{folder} has results up to step {step}, but no {LAST} to resume from: move or delete "
            "that folder."
        )


def _last_evaluation(folder: Path) -> int:
    from lit_diffusion.cli.loggers import read_evaluations

    records = read_evaluations(folder / "evaluations.jsonl")
    return max((record.get("step") or 0 for record in records), default=0)


def _logged_batches(folder: Path) -> int:
    from lit_diffusion.cli.loggers import read_rows

    rows = read_rows(folder / "metrics.csv")
    return max((int(row["step"]) + 1 for row in rows if "step" in row), default=0)


# The runs


@dataclass
class Sweep:
    """Runs all planned runs to completion, at most `at_once` in parallel.

    Attributes:
        saved: whether a signal made a fit save a checkpoint and end. If so, no further run is
            started.
    """

    runs: Sequence[PlannedRun]
    at_once: int
    saved: bool = field(default=False, init=False)
    finished: set[PlannedRun] = field(default_factory=set, init=False)

    def run(self) -> None:
        """Start or resume every unfinished run, and print its outcome."""
        run_jobs(self.jobs(), self.at_once, self.on_end)

    def tally(self) -> str:
        """Number of finished runs, for messages."""
        return f"{len(self.finished)} of {len(self.runs)} runs finished"

    def jobs(self) -> Iterator[Job | None]:
        """Yield the jobs to start, or None while other processes run all remaining runs."""
        queue, reported = deque(self.runs), set[PlannedRun]()
        while queue and not self.saved:
            run = queue.popleft()
            try:
                job = self._prepare(run)
            except InUse:
                queue.append(run)
                if run in reported:
                    yield None
                else:
                    print_status(f"waiting for {run.name}, which is being run by another process")
                    reported.add(run)
                continue
            if job is not None:
                yield job

    def _prepare(self, run: PlannedRun) -> Job | None:
        """Make the job that starts or resumes a run; None if it is finished or cannot be resumed.

        Raises:
            InUse: if another process is running it.
        """
        with ExitStack() as unless_started:
            log = unless_started.enter_context(claim_log(run.folder / LOG))
            with occupied(run.folder):  # raises if a fit outside of a sweep uses the folder
                options = self._start_options(run)
            if options is None:
                return None
            unless_started.pop_all()
        program = shutil.which("lit-diffusion", path=Path(sys.executable).parent)
        return Job(run.name, [program or "lit-diffusion", *run.command[1:], *options], log)

    def _start_options(self, run: PlannedRun) -> list[str] | None:
        """Additional options to start or resume a run; None if it must not be started."""
        try:
            steps = run.completed_steps()
        except ValueError as error:  # a damaged checkpoint does not stop other runs
            print_status(f"{run.name} CANNOT RESUME: {error}")
            return None
        if steps is None:
            if latest_config(run.folder):  # it was killed before its first checkpoint
                for path in run.folder.iterdir():
                    is_link = path.is_symlink() and path.is_dir()  # the user's, to another disk
                    if path.name not in (LOG, CLAIM) and not is_link:
                        remove(path)
            print_status(f"{run.name} starts")
            return []
        if steps >= run.max_steps:
            self.finished.add(run)
            print_status(f"{run.name} was finished before")
            return None
        print_status(f"{run.name} resumes at step {steps}")
        return [RESUME]

    def on_end(self, job: Job, code: int, seconds: float) -> None:
        """Print the outcome of a run whose process has ended."""
        run = next(run for run in self.runs if run.name == job.name)
        duration = timedelta(seconds=round(seconds))
        self.saved |= code == EXIT_SAVED
        try:
            steps = run.completed_steps() or 0
        except ValueError as error:
            print_status(f"{run.name} ended after {duration} with a damaged checkpoint: {error}")
            return
        progress = f"saved at step {steps} of {run.max_steps}"
        if steps >= run.max_steps and code == 0:
            self.finished.add(run)
            print_status(f"{run.name} finished in {duration}; {self.tally()}")
        elif code == EXIT_SAVED:
            print_status(
                f"{run.name} {progress} on a signal, after {duration}; no further run is started"
            )
        else:
            with check_regular(run.folder / LOG).open(errors="replace") as lines:
                tail = "\n".join(f"  | {line.rstrip()}" for line in deque(lines, 15))
            how = f"FAILED with exit code {code}" if code else "STOPPED EARLY"
            print_status(
                f"{run.name} {how} after {duration}, {progress}. The end of {run.folder / LOG}:\n"
                f"{tail}"
            )
