"""Files that are broken, forged or malicious: each gives a message, and none does anything else.

    pytest tests/integration/test_hostile_files.py -m ""             # some of each kind
    HOSTILE=all pytest tests/integration/test_hostile_files.py -m ""  # every one
    pytest tests/integration/test_hostile_files.py -k kinds -s       # how many there are, by kind

Every case calls the command line in this process, under a guard that stops network, other programs
and writes elsewhere; some are called again as processes of their own.
"""

import hashlib
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support import hostile_checkpoints, hostile_configs, hostile_images, hostile_runs
from support.commands import SCRIPT
from support.guard import Guard, Stopped, TooLong, guarded
from support.hostile_case import CANARY, RUN, Case, make_arena, prepare, try_case

EVERY = [
    *hostile_checkpoints.cases(),
    *hostile_configs.cases(),
    *hostile_images.cases(),
    *hostile_runs.cases(),
]
TRIED = 100
QUICK = 12
AS_PROCESSES = 12


def chosen(count: int) -> list[Case]:
    """So many cases of all kinds in turn, as a hash of their names chooses."""
    by_hash = sorted(EVERY, key=lambda case: hashlib.sha256(case.name.encode()).hexdigest())
    seen: Counter[str] = Counter()
    ranked = []
    for case in by_hash:
        ranked.append((seen[case.kind], case))
        seen[case.kind] += 1
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])][:count]


CASES = chosen(len(EVERY) if os.environ.get("HOSTILE") == "all" else TRIED)
quick = {case.name for case in chosen(QUICK)}


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "arena"
    make_arena(path)
    return path


@pytest.fixture(autouse=True)
def _back(monkeypatch):
    """A case changes the current folder."""
    monkeypatch.chdir(Path.cwd())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in quick else pytest.mark.slow)
        for case in CASES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_file_gives_a_message_and_does_nothing_else(case, arena, tmp_path):
    outcome = try_case(case, arena, tmp_path / "work")
    assert outcome.faults(case) == [], outcome.said[-3000:]


@pytest.mark.system
@pytest.mark.parametrize("case", chosen(AS_PROCESSES), ids=lambda case: case.name)
def test_a_hostile_file_does_no_more_to_a_process_of_its_own(case, arena, tmp_path):
    environment = prepare(case, arena, tmp_path / "work")
    command = [SCRIPT, *case.arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, timeout=120
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode in (*case.codes, *((0,) if case.harmless else ())), said
    assert "Traceback" not in said
    assert not (tmp_path / CANARY).exists()


def test_there_are_at_least_500_cases_of_many_kinds():
    kinds = Counter(case.kind for case in EVERY)
    for kind, count in kinds.items():
        print(f"{count:4d}  {kind}")
    print(f"{len(EVERY):4d}  in all")
    assert len({case.name for case in EVERY}) == len(EVERY) >= 500


def add_what_commands_read(rng):
    hostile_images.write_folder_config()
    hostile_runs.write_arms()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_healthy_run_passes_every_command(arena, tmp_path):
    """Else the refusals would show nothing."""
    for i, command in enumerate(
        (
            *hostile_checkpoints.COMMANDS,
            hostile_images.EVALUATE,
            hostile_images.FIT,
            hostile_configs.FIT,
            hostile_runs.COMPARE,
        )
    ):
        case = Case("healthy", f"healthy-{i}", add_what_commands_read, command, "")
        assert try_case(case, arena, tmp_path / str(i)).code == 0


# The guard itself


@pytest.mark.parametrize(
    "deed",
    [
        lambda: Path("../elsewhere").write_text("x"),
        lambda: os.open("../elsewhere", os.O_CREAT | os.O_WRONLY),
        lambda: Path("../elsewhere").mkdir(),
        lambda: os.rename("mine", "../elsewhere"),
        lambda: os.symlink("mine", "../elsewhere"),
        lambda: os.remove("../theirs"),
        lambda: os.truncate("../theirs", 0),
        lambda: os.system("touch ../elsewhere"),
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: subprocess.run(["true"], check=False),
        lambda: os.fork(),
        lambda: __import__("socket").create_connection(("127.0.0.1", 9)),
        lambda: __import__("urllib.request").request.urlopen("http://127.0.0.1:9"),
        lambda: __import__("pickle").loads(b"cos\nsystem\n(S'true'\ntR."),
        lambda: __import__("stranger"),
    ],
)
def test_the_guard_stops_and_remembers(deed, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("mine").write_text("x")
    Path("../theirs").write_text("x")
    guard = Guard((Path.cwd(),), ("stranger",))
    with guarded(guard, 30, 2**31), pytest.raises(Stopped):
        deed()
    with guarded(guard, 30, 2**31):
        Path("other").write_text("what is allowed")
    assert len(guard.stopped) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"work", "theirs"}
    assert Path("../theirs").read_text() == "x"


def test_the_guard_ends_what_has_no_end_and_what_takes_all_memory(tmp_path):
    guard = Guard((tmp_path,))
    with guarded(guard, 0.2, 2**31), pytest.raises(TooLong):
        time.sleep(60)
    with guarded(guard, 30, 2**28), pytest.raises(MemoryError):
        bytearray(2**30)


# What the program itself writes


def reads_without_code(path: Path) -> bool:
    """Whether a file is read by what cannot run code in it."""
    if path.suffix == ".ckpt":
        torch.load(path, weights_only=True)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            assert all(arrays[name].dtype != object for name in arrays)
    elif path.suffix == ".npy":
        assert np.load(path, allow_pickle=False).dtype != object
    elif path.suffix == ".png":
        return path.read_bytes().startswith(b"\x89PNG")
    elif path.name.startswith("events.out.tfevents"):
        return True  # length-prefixed protocol buffers, in which there is no code
    else:
        path.read_text(encoding="utf-8")
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_file_that_a_run_leaves_is_read_without_running_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hostile_runs.run_everything()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        assert reads_without_code(path), path
    kinds = Counter(path.suffix for path in files)
    assert kinds[".ckpt"] >= 4, kinds
    written = ".png .npz .npy .csv .jsonl .yaml .json .log .html"
    assert {*written.split()} <= kinds.keys()
    assert (tmp_path / RUN / "checkpoints/best-fid.ckpt").is_file()
