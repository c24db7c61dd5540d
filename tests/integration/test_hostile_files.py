"""Files that are broken, forged or malicious: each gives a message, and none does anything else.

HOSTILE=500 FIRST_SEED=100 pytest -m rare tests/integration/test_hostile_files.py  # drawn ones
"""

import os
import random
import shlex
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support import hostile_checkpoints, hostile_configs, hostile_files
from support.commands import SCRIPT
from support.guard import Guard, Stopped, TooLong, guarded
from support.hostile import (
    CANARY,
    EVALUATE,
    FIT,
    RESUME,
    RUN,
    SAMPLE,
    VALIDATE,
    Case,
    faults,
    healthy_config,
    make_arena,
    prepare,
)
from support.tiny_run import spec, write_config

from lit_diffusion.cli.main import main

CASES = [*hostile_checkpoints.cases(), *hostile_configs.cases(), *hostile_files.cases()]
DRAWN = (
    hostile_checkpoints.flipped,
    hostile_checkpoints.deep,
    hostile_configs.mutated,
    hostile_configs.damaged,
    hostile_files.flipped,
)
FIRST, COUNT = (int(os.environ.get(name, n)) for name, n in (("FIRST_SEED", 20), ("HOSTILE", 180)))
SEEDS = [
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)),
    *(pytest.param(seed, marks=pytest.mark.rare) for seed in range(FIRST, FIRST + COUNT)),
]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "arena"
    make_arena(path)
    return path


@pytest.fixture(autouse=True)
def _back(monkeypatch):
    """A case changes the current folder."""
    monkeypatch.chdir(Path.cwd())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_gives_a_message_and_does_nothing_else(case, arena, tmp_path):
    assert faults(case, arena, tmp_path / "work") == []


@pytest.mark.parametrize("seed", SEEDS)
def test_so_does_a_drawn_one(seed, arena, tmp_path):
    draw = DRAWN[seed % len(DRAWN)]
    assert faults(draw(random.Random(seed)), arena, tmp_path / "work") == []


@pytest.mark.system
def test_a_hostile_file_does_no_more_to_a_process_of_its_own(arena, tmp_path):
    (case,) = [case for case in CASES if case.name == "code-os.system"]
    environment = prepare(case, arena, tmp_path / "work")
    command = [SCRIPT, *shlex.split(case.command)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode in case.codes, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert not (tmp_path / CANARY).exists()


@pytest.mark.slow
def test_the_healthy_run_passes_every_command(arena, tmp_path):
    """Else the refusals would show nothing."""

    def add_what_commands_read():
        hostile_files.write_folder_config()
        hostile_files.write_arms()

    images = hostile_files.IMAGES, hostile_files.FOLDER, hostile_files.COMPARE
    commands = SAMPLE, hostile_checkpoints.RAW, RESUME, VALIDATE, EVALUATE, FIT, *images
    for command in commands:
        case = Case("healthy", add_what_commands_read, command, "", harmless=True, codes=())
        assert faults(case, arena, tmp_path / command.replace("/", " ")) == []


# The guard itself


DEEDS = [
    lambda: Path("../elsewhere").write_text("x"),
    lambda: os.rename("mine", "../elsewhere"),
    lambda: os.remove("../theirs"),
    lambda: os.system("touch ../elsewhere"),
    lambda: os.fork(),
    lambda: __import__("socket").create_connection(("127.0.0.1", 9)),
    lambda: __import__("pickle").loads(b"cos\nsystem\n(S'true'\ntR."),
    lambda: __import__("stranger"),
]


@pytest.mark.parametrize("deed", DEEDS)
def test_the_guard_stops_and_remembers(deed, folder, monkeypatch):
    Path("work").mkdir()
    Path("theirs").write_text("x")
    monkeypatch.chdir("work")
    Path("mine").write_text("x")
    guard = Guard((Path.cwd(),), ("stranger",))
    with guarded(guard, 30, 2**31), pytest.raises(Stopped):
        deed()
    with guarded(guard, 30, 2**31):
        Path("other").write_text("what is allowed")
    assert len(guard.stopped) == 1
    assert {path.name for path in folder.iterdir()} == {"work", "theirs"}
    assert Path("../theirs").read_text() == "x"


def test_the_guard_ends_what_has_no_end_and_what_takes_all_memory(tmp_path):
    guard = Guard((tmp_path,))
    with guarded(guard, 0.2, 2**31), pytest.raises(TooLong):
        time.sleep(60)
    with guarded(guard, 30, 2**28), pytest.raises(MemoryError):
        bytearray(2**30)


# What the program itself writes


def assert_reads_without_code(path: Path) -> None:
    if path.suffix == ".ckpt":
        torch.load(path, weights_only=True)
    elif path.suffix in (".npz", ".npy"):
        arrays = np.load(path, allow_pickle=False)
        arrays = arrays.values() if path.suffix == ".npz" else [arrays]
        assert all(array.dtype != object for array in arrays), path
    elif path.suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    elif not path.name.startswith("events.out.tfevents"):  # protocol buffers, which hold no code
        path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_file_that_a_run_leaves_is_read_without_running_code(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    config = healthy_config()
    config["trainer"]["callbacks"] += [
        spec("lit_diffusion.callbacks.SampleGrid", num=4, every_n_steps=2),
        spec("lit_diffusion.callbacks.NoiseLevelLoss", num_levels=2, num_images=4),
    ]
    write_config(config, Path("small.yaml"))
    adam = spec("torch.optim.Adam", lr=0.001)
    write_config({"model": {"init_args": {"optimizer": adam}}}, Path("arm.yaml"))
    evaluate = f"{EVALUATE} --out evaluated"
    sweep = "sweep small.yaml --arms arm.yaml --seeds 0 --out sweep"
    for command in ("fit --config small.yaml", RESUME, SAMPLE, evaluate, sweep):
        assert main(command.split()) == 0, command
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        assert_reads_without_code(path)
    kinds = Counter(path.suffix for path in files)
    assert kinds[".ckpt"] >= 4, kinds
    written = {".png", ".npz", ".npy", ".csv", ".jsonl", ".yaml", ".json", ".log", ".html"}
    assert written <= kinds.keys()
    assert (folder / RUN / "checkpoints/best-fid.ckpt").is_file()
