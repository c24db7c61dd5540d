"""The runs of a sweep: which there are, and whether each can be started where it is to go."""

import io
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.cli.run_folder import latest_config, read_config
from lit_diffusion.lab.compare.arms import overrides

LAST = Path("checkpoints", "last.ckpt")
"""Of a run folder."""

_OF_A_PROCESS = ("ckpt_path", "weights_only", "trainer.default_root_dir")
"""Settings in which processes of one run may differ."""


@dataclass(frozen=True)
class Planned:
    """One arm with one seed: a fit with these options, finished after `max_steps` updates."""

    arm: str
    seed: int
    folder: Path
    options: tuple[str, ...]
    max_steps: int

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.arm}/seed-{self.seed}"

    @property
    def command(self) -> list[str]:
        """What starts it."""
        return ["lit-diffusion", "fit", *self.options]

    def steps(self) -> int | None:
        """Optimizer steps that its last checkpoint was trained for.

        Without one: that its curves tell of, since checkpoints of finished runs may be deleted;
        None where they tell of less than the whole run.
        """
        from lit_diffusion.checkpoints.reading import read_checkpoint
        from lit_diffusion.cli.loggers import read_rows

        file = self.folder / LAST
        if file.exists():
            return int(read_checkpoint(file, mmap=True)["global_step"])
        logged = (int(row["step"]) + 1 for row in read_rows(self.folder / "metrics.csv"))
        told = max([_evaluated(self.folder), *logged])
        return told if told >= self.max_steps else None


def plan(
    files: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    out: Path,
    options: Sequence[str],
    say: Callable[[str], None],
) -> list[Planned]:
    """All runs, each checked before the first is started; those of the first seed come first.

    Raises:
        ValueError: for options or configs that do not fit, or a folder that holds another run.
    """
    arms = {arm: [f"--config={file}" for file in found] for arm, found in files.items()}
    settings = {arm: _settings(arm, [*configs, *options]) for arm, configs in arms.items()}
    for arm, found in files.items():
        for sentence in overrides(found[1:]):
            say(f"arm {arm}: {sentence}")
    copies = _copies(settings)
    for arm, original in copies.items():
        say(f"arm {arm} is left out: its settings are those of {original}")
    runs = []
    for seed, arm in itertools.product(seeds, [arm for arm in arms if arm not in copies]):
        folder = out / arm / f"seed-{seed}"
        _refuse_another(folder, settings[arm] | {"seed_everything": seed})
        own = (f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}")
        steps = settings[arm]["trainer"]["max_steps"]
        runs.append(Planned(arm, seed, folder, (*arms[arm], *options, *own), steps))
    return runs


def _copies(settings: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Arms that would train what an arm before them trains, and which.

    A copy shows nothing, and each test that is made takes from the power of the others.
    """
    first = {arm: next(k for k in settings if settings[k] == settings[arm]) for arm in settings}
    return {arm: original for arm, original in first.items() if original != arm}


def _settings(arm: str, options: Sequence[str]) -> dict[str, Any]:
    """The whole config of a fit, or why that or a sweep would refuse it."""
    from lit_diffusion.cli.trainer_cli import run_command

    printed = io.StringIO()
    try:
        with redirect_stdout(printed), suppress(SystemExit):
            run_command(["fit", *options, "--print_config"])
        settings: dict[str, Any] = yaml.safe_load(printed.getvalue())
        _check_settings(settings)
    except ValueError as error:
        raise ValueError(f"arm {arm}: {error}") from error
    return settings


def _check_settings(settings: dict[str, Any]) -> None:
    trainer = settings["trainer"]
    if trainer["max_steps"] < 1:
        raise ValueError(
            "runs are finished after trainer.max_steps optimizer steps, got "
            f"{trainer['max_steps']}; set it."
        )
    if trainer["enable_checkpointing"] is False or trainer["fast_dev_run"]:
        raise ValueError(
            "runs are resumed from checkpoints; leave out trainer.enable_checkpointing=false and "
            "trainer.fast_dev_run."
        )
    if settings["ckpt_path"] is not None:
        raise ValueError(f"runs start from scratch; leave out ckpt_path={settings['ckpt_path']}.")


def _refuse_another(folder: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on in a folder with a run of other settings, or one that lost its checkpoint."""
    config = latest_config(folder)
    if config is not None and (changes := _changes(read_config(config), wanted)):
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(changes)}. Restore them, choose "
            "another --out, or delete that folder."
        )
    if (folder / LAST).is_file():
        return
    if lost := sorted(folder.rglob("*.ckpt")):
        raise ValueError(f"{folder} has {lost[0].name}, but no {LAST}: move or delete that folder.")
    if 0 < (step := _evaluated(folder)) < wanted["trainer"]["max_steps"]:
        raise ValueError(
            f"{folder} has evaluations up to step {step}, but no {LAST} to go on from: move or "
            "delete that folder."
        )


def _evaluated(folder: Path) -> int:
    from lit_diffusion.cli.loggers import read_evaluations

    records = read_evaluations(folder / "evaluations.jsonl")
    return max((record.get("step") or 0 for record in records), default=0)


def _changes(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    from lit_diffusion.cli.changed_settings import differences

    changes: dict[str, tuple[Any, Any]] = {}
    for key in sorted(saved.keys() | wanted.keys()):
        changes |= differences(saved.get(key), wanted.get(key), key)
    return [
        f"{key} was {reprlib.repr(old)}, is {reprlib.repr(new)}"
        for key, (old, new) in changes.items()
        if key not in _OF_A_PROCESS
    ]
