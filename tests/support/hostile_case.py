"""A case of the fuzz test: one healthy run, something spoilt in it or beside it, one command."""

import contextlib
import hashlib
import io
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import URLError

import yaml
from PIL import Image

from lit_diffusion.checkpoints.averages import find_averages
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.main import main
from support.guard import Guard, guarded
from support.small_digits import small_digits
from support.tiny_run import write_config

RUN = Path("runs/small")
LAST = RUN / "checkpoints" / "last.ckpt"
CANARY = "EXECUTED"
"""A file beside the arena that whatever is run by mistake leaves behind."""

SECONDS = 30.0
BYTES = 3 * 2**30
STRANGER = f"""
from pathlib import Path
import torch
Path(__file__).parent.parent.joinpath({CANARY!r}).write_text("imported")
class Net(torch.nn.Module): ...
def call(*args, **kwargs): ...
"""


@dataclass(frozen=True)
class Case:
    """What is spoilt, what is called, and what must come of it.

    Args:
        kind: under which it is counted.
        name: of its own.
        spoil: changes files in the current folder, which holds a healthy run; its randomness is a
            function of the name.
        command: arguments of lit-diffusion.
        tells: pattern that the message must hold: the file or the setting.
        codes: exit codes that will do.
        harmless: whether exit code 0 will do too, as what is spoilt may not matter: asked after the
            command.
        writes: names of files in a run folder that a command may write that fails later on.
        offline: whether a download may be tried, which finds no network.
    """

    kind: str
    name: str
    spoil: Callable[[random.Random], None]
    command: str
    tells: str
    codes: tuple[int, ...] = (2,)
    harmless: Callable[[], bool] | None = None
    writes: tuple[str, ...] = ()
    offline: bool = False

    @property
    def arguments(self) -> list[str]:
        """Of lit-diffusion."""
        return shlex.split(self.command)


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        code: exit code.
        said: standard error and output.
        stopped: what the guard stopped.
        changed: files in run folders that are new, gone or other.
        ruined: those of them that a run could not go on from.
        harmless: what the case says of it.
    """

    code: int
    said: str
    stopped: list[str]
    changed: list[str]
    ruined: list[str]
    harmless: bool

    def faults(self, case: Case) -> list[str]:
        """Everything that must not be."""
        found = [f"the guard stopped {what}" for what in self.stopped]
        if Path("..", CANARY).exists():
            found.append("code was executed")
        if "Traceback (most recent call last)" in self.said:
            found.append("a traceback was shown")
        found += [f"{file} was ruined" for file in self.ruined]
        if self.code == 0 and self.harmless:
            return found
        if self.code not in case.codes:
            found.append(f"the exit code is {self.code}")
        if not re.search(case.tells, self.said):
            found.append(f"the message does not name {case.tells}")
        changed = [file for file in self.changed if Path(file).name not in case.writes]
        return found + [f"{file} was changed" for file in changed]


def healthy_config() -> dict:
    """Of the run that is spoilt: real parts, all small."""
    fid = {"num_samples": 16, "extractor": "digits-cnn", "every_n_steps": 2, "batch_size": 16}
    made = small_digits(4, enable_progress_bar=False, limit_val_batches=1, max_epochs=1)
    callbacks = {
        "FIDEvaluation": fid,
        "MomentumDecay": {},
        "TimestepCurriculum": {"num_steps": 3},
    }
    made["trainer"]["callbacks"][0]["init_args"]["decays"] = [0.9, 0.5]
    made["trainer"]["callbacks"] += [
        {"class_path": f"lit_diffusion.callbacks.{name}", "init_args": arguments}
        for name, arguments in callbacks.items()
    ]
    return made


def make_arena(root: Path) -> None:
    """A folder with a healthy run, its config, images, and a module that must not be imported."""
    root.mkdir(parents=True)
    with contextlib.chdir(root):
        write_config(healthy_config(), Path("small.yaml"))
        Path("strangers").mkdir()
        Path("strangers/stranger.py").write_text(STRANGER)
        Path("images").mkdir()
        rng = random.Random("images")
        for i in range(8):
            Image.frombytes("L", (8, 8), rng.randbytes(64)).save(f"images/{i}.png")
        assert main(["fit", "--config", "small.yaml"]) == 0


def prepare(case: Case, arena: Path, work: Path) -> dict[str, str]:
    """A spoilt copy of the arena, then the current folder; returns the environment for it."""
    shutil.copytree(arena, work, symlinks=True)
    os.chdir(work)
    (work / "tmp").mkdir()
    own = {"XDG_CACHE_HOME": str(work / "cache"), "TMPDIR": str(work / "tmp")}
    path = os.pathsep.join([str(work / "strangers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **own, "TORCH_HOME": str(work / "hub"), "PYTHONPATH": path}
    with patch.dict(os.environ, environment):
        case.spoil(random.Random(case.name))
    return environment


def try_case(case: Case, arena: Path, work: Path) -> Outcome:
    """Try a case on a copy of the arena; the current folder is then that copy."""
    environment = prepare(case, arena, work)
    before = fingerprints(Path("runs"))
    guard = Guard((work,), ("stranger",))
    said = io.StringIO()
    with (
        patch.object(sys, "path", [str(work / "strangers"), *sys.path]),
        patch.object(tempfile, "tempdir", str(work / "tmp")),
        patch.dict(os.environ, environment),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        patch("urllib.request.urlopen", _no_network) if case.offline else contextlib.nullcontext(),
        guarded(guard, SECONDS, BYTES),
    ):
        code = main(case.arguments)
    after = fingerprints(Path("runs"))
    changed = [
        file
        for file in before.keys() | after.keys()
        if before.get(file) != after.get(file)
        # TensorBoard opens a file of its own for every attempt.
        and not (file not in before and "/tensorboard/" in file)
        and not file.startswith("runs/new")
    ]
    harmless = code == 0 and case.harmless is not None and case.harmless()
    ruined = [file for file in changed if file.endswith(".ckpt") and _is_ruined(Path(file))]
    return Outcome(code, said.getvalue(), guard.stopped, sorted(changed), sorted(ruined), harmless)


def _is_ruined(checkpoint: Path) -> bool:
    """Whether a file that a command has written cannot be read, or has useless weights."""
    if not checkpoint.exists() or checkpoint.name.startswith("non-finite-"):
        return False
    try:
        content = read_checkpoint(checkpoint)
        averages = [
            each for state in find_averages(content, checkpoint) for each in state["shadows"]
        ]
    except ValueError:
        return True
    held = [content["state_dict"], *averages]
    return not all(value.isfinite().all() for each in held for value in each.values())


def _no_network(*args: Any, **kwargs: Any) -> None:
    raise URLError("this test has no network")


def fingerprints(folder: Path) -> dict[str, str]:
    """Of every file below a folder, by its path."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else str(path.lstat().st_mode)
        for path in _below(folder)
    }


def _below(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.rglob("*"))


def change_config(change: Callable[[dict], None], path: Path = Path("small.yaml")) -> None:
    """Read, change and write a config."""
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
