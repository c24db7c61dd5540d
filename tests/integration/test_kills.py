"""A real fit is killed again and again, at any instant, and loses nothing."""

import os
import random
import signal
import subprocess
import time
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
        {"class_path": "lit_diffusion.commands.keeping.LastCheckpoint", "init_args": given},
    ]
    schedule = {"total_steps": STEPS, "warmup_steps": 4}
    made["model"]["init_args"]["lr_scheduler"]["init_args"] = schedule
    made["trainer"] |= {"enable_progress_bar": False, "default_root_dir": str(folder)}
    made["trainer"]["max_epochs"] = -1
    return made


def start(name):
    folder = Path(name)
    command = [SCRIPT, "fit", "--config", write_config(config(folder), Path(f"{name}.yaml"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path(f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--ckpt_path=last"], stdout=log, stderr=log, env=environment
        )


def training(process, folder):
    """Wait until it logs something new; whether it still runs."""
    metrics = folder / "metrics.csv"
    before = metrics.stat().st_mtime_ns if metrics.exists() else None
    while process.poll() is None:
        if metrics.exists() and metrics.stat().st_mtime_ns != before:
            return True
        time.sleep(0.01)
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


@pytest.mark.slow
def test_a_fit_that_is_killed_at_random_instants_ends_as_if_it_never_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start("whole").wait() == 0
    rng, folder, lives = random.Random(0), Path("killed"), 0
    while lives < KILLS:
        process = start("killed")
        if not training(process, folder):
            break
        time.sleep(rng.uniform(0, 1.2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        lives += 1
    assert lives == KILLS
    assert start("killed").wait() == 0
    assert_same_bits(end(folder), end(Path("whole")))
    for killed, whole in zip(curves(folder), curves(Path("whole")), strict=True):
        assert first_difference(killed, whole) is None
