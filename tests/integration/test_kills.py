"""A real fit is killed again and again, at any instant, and loses nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from support.commands import SCRIPT
from support.plain_module import assert_same_bits
from support.resuming import curves
from support.small_digits import small_digits
from support.tiny_run import write_config

KILLS = 20
STEPS = 900
KINDS = ("at random", "in a save", "in a validation")
SAVED = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "epoch", "global_step")


def config(folder):
    """Saves as often as LastCheckpoint does, and validates and scores on the way."""
    given = {"folder": str(folder / "checkpoints"), "first": 1, "every_n_seconds": 0.0}
    made = small_digits(STEPS, check_val_every_n_epoch=None, val_check_interval=40)
    fid = {"num_samples": 70, "extractor": "digits-cnn", "every_n_steps": 150, "batch_size": 70}
    made["trainer"]["callbacks"] += [
        {
            "class_path": "lit_diffusion.callbacks.MomentumDecay",
            "init_args": {"min_beta1": 0.4},
        },
        {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": fid},
        {"class_path": "lit_diffusion.cli.last_checkpoint.LastCheckpoint", "init_args": given},
        {
            "class_path": "support.marks_validations.MarksValidations",
            "init_args": {"path": f"{folder}.validates"},
        },
    ]
    schedule = {"total_steps": STEPS, "warmup_steps": 4}
    made["model"]["init_args"]["lr_scheduler"]["init_args"] = schedule
    made["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(folder)}
    made["trainer"]["max_epochs"] = -1
    return made


def start(name):
    folder = Path(name)
    command = [SCRIPT, "fit", "--config", write_config(config(folder), Path(f"{name}.yaml"))]
    command += ["--trust=support"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with Path(f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--ckpt_path=last-or-none"], stdout=log, stderr=log, env=environment
        )


def stamp(file):
    """When a file was written to; None where it is not there."""
    with suppress(FileNotFoundError):
        return file.stat().st_mtime_ns
    return None


def awaited(process, file):
    """Wait until a file is written to; whether the process still runs."""
    before = stamp(file)
    while process.poll() is None:
        if stamp(file) not in (None, before):
            return True
        time.sleep(0.0005)
    return False


def end(folder):
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    found = {key: saved[key] for key in SAVED}
    found["callbacks"] = {k: v for k, v in saved["callbacks"].items() if "LastCheckpoint" not in k}
    return found


def first_difference(found, expected):
    """(row, found, expected) where two lists begin to differ; a diff of all rows takes minutes."""
    for i, (row, other) in enumerate(zip_longest(found, expected)):
        if row != other:
            return i, row, other
    return None


def killed(kind, folder, rng):
    """A life that trains, and ends in a way: at random, or in a save or a validation if it can.

    Returns:
        Where it ended, as the file tells that only exists meanwhile.
    """
    files = {
        "in a save": folder / "checkpoints" / ".last.ckpt.part",
        "in a validation": Path(f"{folder}.validates"),
    }
    before = {place: stamp(file) for place, file in files.items()}
    process = start(str(folder))
    assert awaited(process, folder / "metrics.csv")
    if kind == "at random":
        time.sleep(rng.uniform(0, 1.2))
    else:
        assert awaited(process, files[kind])
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = [place for place, file in files.items() if stamp(file) not in (None, before[place])]
    return left[0] if left else "at random"


@pytest.mark.rare
@pytest.mark.slow
def test_a_fit_that_is_killed_anywhere_ends_as_if_it_never_was(tmp_path, monkeypatch):
    """Also in the middle of a save, and of a validation."""
    monkeypatch.chdir(tmp_path)
    assert start("whole").wait() == 0
    rng, folder = random.Random(0), Path("killed")
    counts = Counter(killed(KINDS[life % len(KINDS)], folder, rng) for life in range(KILLS))
    assert all(counts[kind] >= 2 for kind in KINDS), counts
    assert start("killed").wait() == 0
    assert_same_bits(end(folder), end(Path("whole")))
    for found, whole in zip(curves(folder), curves(Path("whole")), strict=True):
        assert first_difference(found, whole) is None
