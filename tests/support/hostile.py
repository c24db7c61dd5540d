"""A spoilt copy of a healthy run, one command on it, and what may come of it."""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from PIL import Image

from lit_diffusion.cli.main import main
from support.guard import Guard, guarded
from support.small_digits import small_digits
from support.tiny_run import spec, write_config

RUN = Path("runs/small")
LAST = RUN / "checkpoints" / "last.ckpt"
CONFIG = Path("small.yaml")
CANARY = "EXECUTED"
"""A file beside the arena that whatever runs by mistake leaves behind."""

SAMPLE = f"sample --checkpoint {RUN} --num 2 --out out"
EVALUATE = f"evaluate --checkpoint {RUN} --num 8"
VALIDATE = f"validate --ckpt_path {LAST}"
RESUME = "fit --config small.yaml --ckpt_path=last --trainer.max_steps=5"
FIT = "fit --config small.yaml --trainer.default_root_dir=runs/new"

SECONDS, BYTES = 30.0, 3 * 2**30
STRANGER = f"""
from pathlib import Path
import torch
Path(__file__).parent.parent.joinpath({CANARY!r}).write_text("imported")
class Net(torch.nn.Module): ...
def call(*args, **kwargs): ...
"""


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


TOUCH = f"touch ../{CANARY}"
WRITE = f"open('../{CANARY}', 'w').write('executed')"


@dataclass(frozen=True)
class Case:
    """A spoilt file and a command that must refuse it.

    Args:
        name: of its own.
        spoil: changes files in the current folder, which holds a healthy run.
        command: arguments of lit-diffusion.
        pattern: of the message, which must name the file or the setting.
        harmless: whether the command may also end well; or a check that it may, asked afterwards.
        codes: other exit codes that will do.
        writes: names of files in a run folder that a command may write that fails later on.
    """

    name: str
    spoil: Callable[[], Any]
    command: str
    pattern: str
    harmless: bool | Callable[[], bool] = False
    codes: tuple[int, ...] = (2,)
    writes: tuple[str, ...] = ()


def healthy_config() -> dict:
    """Of the run that is spoilt: real parts, all small."""
    fid = {"num_samples": 16, "extractor": "digits-cnn", "every_n_steps": 2, "batch_size": 16}
    config = small_digits(4, enable_progress_bar=False, limit_val_batches=1, max_epochs=1)
    config["trainer"]["callbacks"][0]["init_args"]["decays"] = [0.9, 0.5]
    config["trainer"]["callbacks"] += [
        spec("lit_diffusion.callbacks.FIDEvaluation", **fid),
        spec("lit_diffusion.callbacks.MomentumDecay"),
        spec("lit_diffusion.callbacks.TimestepCurriculum", num_steps=3),
    ]
    return config


def make_arena(root: Path) -> None:
    """A folder with a healthy run, its config, images, and a module that must not be imported."""
    root.mkdir(parents=True)
    with contextlib.chdir(root):
        write_config(healthy_config(), CONFIG)
        Path("strangers").mkdir()
        Path("strangers/stranger.py").write_text(STRANGER)
        Path("images").mkdir()
        rng = random.Random("images")
        for i in range(8):
            Image.frombytes("L", (8, 8), rng.randbytes(64)).save(f"images/{i}.png")
        assert main(["fit", "--config", "small.yaml"]) == 0


def prepare(case: Case, arena: Path, work: Path) -> dict[str, str]:
    """Make a spoilt copy of the arena the current folder; the environment for its command."""
    shutil.copytree(arena, work, symlinks=True)
    os.chdir(work)
    Path("tmp").mkdir()
    path = os.pathsep.join([str(work / "strangers"), os.environ.get("PYTHONPATH", "")])
    folders = {"XDG_CACHE_HOME": "cache", "TMPDIR": "tmp", "TORCH_HOME": "hub"}
    environment = {name: str(work / folder) for name, folder in folders.items()}
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    with patch.dict(os.environ, environment):
        case.spoil()
    return environment


def faults(case: Case, arena: Path, work: Path) -> list[str]:
    """What the command of a case did wrong, on a copy of the arena that becomes the current folder.

    It runs in this process, under a guard that stops network, other programs and writes elsewhere.
    """
    environment = prepare(case, arena, work)
    before = fingerprints(Path("runs"))
    guard, output = Guard((work,), ("stranger",)), io.StringIO()
    with (
        patch.object(sys, "path", [str(work / "strangers"), *sys.path]),
        patch.object(tempfile, "tempdir", str(work / "tmp")),
        patch.dict(os.environ, environment),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        guarded(guard, SECONDS, BYTES),
    ):
        code = main(shlex.split(case.command))
    text = output.getvalue()
    wrong = [f"the guard stopped {event}" for event in guard.stopped]
    if Path("..", CANARY).exists():
        wrong.append("code was executed")
    if "Traceback (most recent call last)" in text:
        wrong.append(f"a traceback: {text[-3000:]}")
    harmless = case.harmless() if code == 0 and callable(case.harmless) else case.harmless
    if code == 0 and harmless:
        return wrong
    if code not in case.codes:
        wrong.append(f"exit code {code}: {text[-3000:]}")
    if not re.search(case.pattern, text):
        wrong.append(f"the message does not name {case.pattern}: {text[-3000:]}")
    after = fingerprints(Path("runs"))
    wrong += [
        f"{file} was changed"
        for file in before.keys() | after.keys()
        if before.get(file) != after.get(file)
        and not file.startswith("runs/new")
        and not (file not in before and "/tensorboard/" in file)  # one for every attempt
        and Path(file).name not in case.writes
    ]
    return wrong


def fingerprints(folder: Path) -> dict[str, str]:
    """Of every file below a folder, by its path."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else str(path.lstat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def change_config(change: Callable[[dict], None], path: Path = CONFIG) -> None:
    """Read, change and write a config."""
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def cut(file: Path, share: float) -> None:
    os.truncate(file, int(share * file.stat().st_size))


def flip(file: Path, rng: random.Random, start: int = 0, end: int | None = None) -> None:
    """Flip one bit of the bytes from start to end."""
    data = bytearray(file.read_bytes())
    data[rng.randrange(start, end or len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def no_files(file: Path) -> dict[str, Callable[[], Any]]:
    """What may stand in the place of a file: name -> what makes it."""
    makers: dict[str, Callable[[], Any]] = {
        "a folder": file.mkdir,
        "a link to nothing": lambda: file.symlink_to("nothing"),
        "a link to itself": lambda: file.symlink_to(file.name),
        "endless zeros": lambda: file.symlink_to("/dev/zero"),
        "a pipe": lambda: os.mkfifo(file),
    }

    def in_place(make: Callable[[], Any]) -> Callable[[], None]:
        def spoil() -> None:
            file.unlink(missing_ok=True)
            make()

        return spoil

    return {name: in_place(make) for name, make in makers.items()}
