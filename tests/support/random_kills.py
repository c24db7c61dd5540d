"""A fit drawn from a seed that is killed and resumed, beside the same fit undisturbed."""

import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.trainer import call, trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from lit_diffusion.cli import fitting  # noqa: F401  imported before the forks
from lit_diffusion.cli.loggers import AppendingCSVLogger
from lit_diffusion.cli.main import main as command_line
from lit_diffusion.modules.diffusion import DiffusionModule
from support.random_fits import random_config
from support.spawn import LAUNCHER, rank_and_size
from support.tiny_run import write_config

PLACES = (
    *("batch", "optimizer step", "validation", "sampling", "save", "saved"),
    *("replacement", "row", "hook"),
)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
ROOT = "run"
LAST = Path(ROOT, "checkpoints", "last.ckpt")
LIVES = 8


class Places:
    """Counts how often a process comes to each place, and signals it at one of them.

    Args:
        place: where, by name; None lets it live.
        count: at which time, from 1 on.
        number: of the signal.
    """

    def __init__(self, place=None, count=0, number=signal.SIGKILL):
        self.death, self.number = (place, count), number
        self.counts = Counter()

    def come(self, place, *_):
        self.counts[place] += 1
        if (place, self.counts[place]) == self.death:
            os.kill(os.getpid(), self.number)

    def watch(self):
        """Come to the places of this process, from now on."""
        for owner, name, place in (
            (DiffusionModule, "training_step", "batch"),
            (DiffusionModule, "validation_step", "validation"),
            (DiffusionModule, "generate", "sampling"),
            (torch, "save", "save"),
            (os, "replace", "replacement"),
            (os, "link", "replacement"),
            (AtomicCheckpointIO, "save_checkpoint", "saved"),
            (TorchCheckpointIO, "remove_checkpoint", "saved"),
            (AppendingCSVLogger, "log_metrics", "row"),
            (call, "_call_callback_hooks", "hook"),
            (call, "_call_lightning_module_hook", "hook"),
        ):
            setattr(owner, name, self._around(getattr(owner, name), place))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            register(partial(self.come, "optimizer step"))
        assert trainer.call is call

    def _around(self, function, place):
        @wraps(function)
        def around(*args, **kwargs):
            if place != "saved":
                self.come(place)
            result = function(*args, **kwargs)
            self.come(place)
            return result

        return around


def main(folder, first, count):
    """How fits end of every n-th of `count` seeds from `first` on, on the r-th of n ranks.

    The folder of a fit that ends otherwise than undisturbed stays: fit.yaml, the undisturbed run
    `whole`, the other one `run`, and what both said, in life.log.
    """
    rank, ranks = rank_and_size()
    reports = []
    for seed in range(int(first) + rank, int(first) + int(count), ranks):
        fit_folder = folder / str(seed)
        fit_folder.mkdir()
        os.chdir(fit_folder)
        reports.append(report_on(seed))
        print(reports[-1], flush=True)
        if not reports[-1]["differences"]:
            shutil.rmtree(fit_folder)
    return reports


def report_on(seed):
    """How the fit of this seed ends, in this folder, with deaths and without."""
    rng = random.Random(seed)
    config = write_config(random_config(rng, ROOT), Path("fit.yaml"))
    code, counts = live(config, Places())
    report = {"seed": seed, "lives": [code], "deaths": [], "differences": ["undisturbed, it fails"]}
    if code == 0:
        Path(ROOT).rename("whole")
        shutil.rmtree("cache", ignore_errors=True)  # what was measured of the data, to do again
        deaths = [drawn_death(rng, counts) for _ in range(rng.randint(1, 3))]
        report["deaths"] = [f"{name} at {where} {n}" for where, n, name in deaths]
        report["lives"] += disturbed(config, deaths)
        report["differences"] = differences(Path("whole"), Path(ROOT))
    return report


def drawn_death(rng, counts):
    where = rng.choice([where for where in PLACES if counts.get(where)])
    return where, rng.randint(1, counts[where]), rng.choice(SIGNALS)


def disturbed(config, deaths):
    """Exit codes of the lives of a fit that dies so, until it is complete."""
    codes = []
    while len(codes) < LIVES:
        places = Places()
        if deaths:
            where, count, name = deaths.pop(0)
            places = Places(where, count, signal.Signals[name])
        codes.append(live(config, places)[0])
        if codes[-1] in (0, 1, 2):
            break
    return codes


def live(config, places):
    """(exit code, how often it came to each place) of a process that fits as far as it comes."""
    again = ["--ckpt_path=last"]
    if not LAST.exists():
        again = []
        shutil.rmtree(ROOT, ignore_errors=True)  # died before the first save: there is no way on
    if (pid := os.fork()) == 0:
        _become_life(["fit", "--config", str(config), "--trust=support", *again], places)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # loading processes
    counts = Path("counts.json")
    loaded = json.loads(counts.read_text()) if counts.exists() else {}
    return os.waitstatus_to_exitcode(status), loaded


def _become_life(arguments, places):
    code = 99
    try:
        os.setsid()
        log = os.open("life.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(log, number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name in LAUNCHER:
            os.environ.pop(name)  # a fit is one process
        rank_zero_only.rank = 0  # which Lightning took from there
        os.environ["XDG_CACHE_HOME"] = str(Path("cache").absolute())
        torch.set_num_threads(1)
        places.watch()
        print("\n$", *arguments, places.death, places.number.name, flush=True)
        code = command_line(arguments)
        Path("counts.json").write_text(json.dumps(places.counts))
        print("exit code", code, flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def differences(whole, run):
    """What two run folders differ in, a line each."""
    names = {folder: set(files_of(folder)) for folder in (whole, run)}
    lines = [f"lacks {name}" for name in sorted(names[whole] - names[run])]
    lines += [f"has {name} too" for name in sorted(names[run] - names[whole])]
    for name in sorted(names[whole] & names[run]):
        contents = [content(folder / name) for folder in (whole, run)]
        lines += [f"{name}: {line}" for line in unequal(*contents, "")]
    return lines


def files_of(folder):
    """Names of files that are no record of when it was started."""
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.is_file() and not name.startswith(("config.", ".config.", ".lock", "tensorboard")):
            yield name


def content(file):
    if file.suffix == ".ckpt":
        return torch.load(file, weights_only=True)
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return file.read_text().splitlines() if file.suffix == ".csv" else file.read_bytes()


def unequal(a, b, where):
    """Where two nested structures differ."""
    if type(a) is not type(b):
        yield f"{where} {type(a).__name__} is {type(b).__name__}"
    elif isinstance(a, dict) and list(a) == list(b):
        for key in a:
            yield from unequal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from unequal(*pair, f"{where}/{i}")
    elif not is_same(a, b):
        yield f"{where}: {str(a)[:300]} is {str(b)[:300]}"


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return not isinstance(a, dict) and a == b  # equal dicts may have another order
