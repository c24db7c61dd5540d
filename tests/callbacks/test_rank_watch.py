"""The rule that names a culprit; watches of several ranks as threads of one process.

Ranks that are processes and fail are in integration/test_rank_failures.py.
"""

import pickle
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.plain_module import PlainModule, loader, make_trainer
from torch.distributed import HashStore

from lit_diffusion.callbacks import RankWatch, rank_watch
from lit_diffusion.callbacks.rank_watch import (
    PATIENCE,
    Heartbeat,
    RankState,
    _count_collectives,
    _has_died,
    _location,
    _process_name,
    _Watch,
    find_culprit,
)
from lit_diffusion.signals import SavedOnSignal

TIMEOUT = 60.0
NOW = 1000.0

# The rule


def rank(silent=0.0, still=0.0, collectives=40, end="", ended=0.0, text="ValueError: bad"):
    """A rank that was heard of, entered its last collective and ended so many seconds ago."""
    heartbeat = Heartbeat(9, 17, collectives, "train.py:3 (step)", "", end, text)
    return RankState(heartbeat, NOW - silent, NOW - still, NOW - ended)


def name_culprit(*ranks, lost=False):
    """Number of the culprit and the message without it."""
    culprit = find_culprit(dict(enumerate(ranks)), NOW, TIMEOUT, lost)
    if culprit is None:
        return None
    number, message = culprit
    assert message.startswith(f"rank {number} ")
    assert message.endswith("; see its output.")
    return number, message.removeprefix(f"rank {number} ").removesuffix("; see its output.")


NEVER_CAME = RankState(heard=NOW - 61)
WAITS = rank(collectives=41, still=61.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(), rank(end="failed")], (1, "failed at step 17: ValueError: bad")),
        ([rank(), rank(silent=61)], (1, "was last heard of at step 17, 61 s ago")),
        ([rank(), NEVER_CAME], (1, "has not come to the start of the run in 61 s")),
        (
            [WAITS, rank(still=300.0), WAITS],
            (1, "has kept the others waiting for 61 s at step 17, in train.py:3 (step)"),
        ),
        ([rank(), rank(end="died")], (1, "ended without a word, last heard of at step 17")),
        (
            [rank(), rank(end="left", ended=61, text="SystemExit: 1")],
            (1, "left at step 17 (SystemExit: 1) without the others"),
        ),
        # The first of those that ended alike, the longest silent, the one furthest behind.
        ([rank(), rank(end="failed"), rank(end="failed", ended=1)], (2, "failed")),
        ([rank(), rank(end="died", ended=2), rank(end="died", ended=1)], (1, "ended")),
        ([rank(), rank(silent=61), rank(silent=99)], (2, "was last")),
        ([WAITS, rank(collectives=40, still=99), rank(collectives=39, still=99)], (2, "has kept")),
        # A failure outweighs what it did to the others.
        ([rank(silent=99), rank(end="died"), rank(end="failed"), rank(end="lost")], (2, "failed")),
        ([rank(silent=99), rank(end="died"), rank(end="lost"), WAITS], (1, "ended")),
    ],
)
def test_the_rank_that_ended_the_run_is_named(ranks, expected):
    number, text = name_culprit(*ranks)
    assert number == expected[0]
    assert text.startswith(expected[1])


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(), rank(end="done"), rank(end="left", ended=5)],
        [rank(end="done"), rank(end="left", ended=99)],
        [rank(silent=TIMEOUT), rank()],
        [rank(still=5000.0), rank(still=5000.0)],  # all work alone, as in an FID
        [rank(still=5000.0), rank(collectives=41, still=59.0)],  # waited for, not too long
        [rank(still=59.0), rank(collectives=99, still=5000.0)],  # only just fell behind
        [rank(still=5000.0), rank(end="done", ended=5000.0, collectives=41, still=5000.0)],
    ],
)
def test_a_rank_that_works_for_long_or_is_done_is_no_failure(ranks):
    assert name_culprit(*ranks) is None


def test_once_a_collective_has_broken_less_is_enough():
    broken = rank(end="lost", collectives=41, still=PATIENCE + 1)
    for other, text in (
        (rank(silent=PATIENCE + 1), "was last heard of"),
        (rank(still=99.0), "has kept the others waiting for 6 s"),
        (rank(end="left"), "left at step 17"),
    ):
        assert name_culprit(broken, other) is None
        number, message = name_culprit(broken, other, lost=True)
        assert (number, message.startswith(text)) == (1, True)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_known_the_verdict_is_fair(seed):
    draw = random.Random(seed)
    ends = ["", "", "", "failed", "died", "left", "lost", "informed", "done"]
    ranks = [
        rank(
            draw.uniform(0, 2 * TIMEOUT),
            draw.uniform(0, 2 * TIMEOUT),
            draw.randrange(40, 43),
            draw.choice(ends),
            draw.uniform(0, 2 * TIMEOUT),
        )
        for _ in range(draw.randrange(2, 6))
    ]
    verdict = name_culprit(*ranks)
    assert verdict is None or ranks[verdict[0]].heartbeat.end in ("", "failed", "died", "left")
    order = draw.sample(range(len(ranks)), len(ranks))
    other = name_culprit(*(ranks[i] for i in order))
    assert (other and order[other[0]]) == (verdict and verdict[0])
    moving = [rank(draw.uniform(0, 3), draw.uniform(0, 50), draw.randrange(40, 43)) for _ in ranks]
    assert name_culprit(*moving) is None


# The callback


@pytest.mark.parametrize("timeout", [0, -1.0, 2.9, float("nan")])
def test_a_time_too_short_for_signs_of_life_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be at least 3 seconds, got"):
        RankWatch(timeout)


def test_a_single_rank_is_left_alone(tmp_path):
    class Failing(PlainModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("[gloo] Connection closed by peer")

    threads = threading.active_count()
    make_trainer(tmp_path, watch := RankWatch()).fit(PlainModule(), loader())
    with pytest.raises(RuntimeError) as raised:
        make_trainer(tmp_path, watch).fit(Failing(), loader())
    assert not hasattr(raised.value, "__notes__")
    assert watch.verdict is None
    assert threading.active_count() == threads


def test_a_watch_that_cannot_begin_ends_no_run_and_hides_no_error(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    trainer, watch = SimpleNamespace(world_size=2), RankWatch()
    watch.setup(trainer, None, "fit")
    watch.on_exception(trainer, None, ValueError("bad"))
    watch.teardown(trainer, None, "fit")
    assert "this rank is not watched: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]"), "lost"),
        (RuntimeError("NCCL communicator was aborted on rank 1."), "lost"),
        (dist.DistNetworkError("Broken pipe"), "lost"),
        (RuntimeError("DataLoader timed out after 5 seconds"), "failed"),
        (ValueError("gloomy\n  " + "x" * 1000), "failed"),
        (SavedOnSignal(15, 3, "last.ckpt"), "left"),
        (KeyboardInterrupt(), "left"),
    ],
)
def test_an_end_is_reported_and_gets_the_verdict_where_the_others_were_lost(
    monkeypatch, error, end
):
    calls = []

    class Recorded(_Watch):
        def __init__(self, trainer, timeout):
            calls.append(timeout)

        def meet(self):
            calls.append("meet")

        def leave(self, end, text=""):
            calls.append(end)
            assert "\n" not in text
            assert len(text) <= 300
            return "rank 1 failed"

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rank_watch, "_Watch", Recorded)
    watch, trainer = RankWatch(3.0), SimpleNamespace(world_size=2)
    watch.setup(trainer, None, "fit")
    watch.teardown(trainer, None, "fit")
    watch.on_exception(trainer, None, error)  # before a `setup`
    watch.teardown(trainer, None, "fit")
    assert calls == [3.0, "meet", "done", 3.0, "meet", end]
    assert watch.verdict == ("rank 1 failed" if end == "lost" else None)
    assert getattr(error, "__notes__", []) == ["rank 1 failed"] * (end == "lost")


def test_it_can_be_sent_to_processes_that_are_spawned():
    assert pickle.loads(pickle.dumps(RankWatch(5.0))).timeout == 5.0


# Watches


@pytest.fixture
def start(monkeypatch):
    """Starts the watches of a run; `messages` are what they would have ended their ranks by."""
    runs = []

    def start_run(size, timeout=60.0, store=None):
        run = SimpleNamespace(store=store or HashStore(), messages={})
        group = SimpleNamespace(
            get_group_store=lambda: run.store, _get_sequence_number_for_group=lambda: 40
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(_Watch, "_act", lambda w: w.acted.update({w._rank: w._message}))
        run.watches = []
        for number in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda number=number: number)
            run.watches.append(_Watch(SimpleNamespace(global_step=3), timeout))
            run.watches[-1].acted = run.messages
        meeting = [threading.Thread(target=watch.meet) for watch in run.watches]
        [thread.start() for thread in meeting]
        [thread.join() for thread in meeting]
        runs.append(run)
        return run

    yield start_run
    for watch in (watch for run in runs for watch in run.watches):
        watch._is_closing.set()
        watch.join(20)
        assert not watch.is_alive()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave(*ends):
    """Watches that leave at the same time, each with what it says; their messages."""
    messages = []
    threads = [
        threading.Thread(target=lambda w=w, end=end: messages.append(w.leave(*end)))
        for w, end in ends
    ]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    return messages


def test_all_hear_of_a_failure(start):
    run = start(3)
    message = "rank 1 failed at step 3: ValueError: bad; see its output."
    leave((run.watches[1], ("failed", "ValueError: bad")))
    until(lambda: run.messages.keys() >= {0, 2})
    assert {*run.messages.values()} == {message}
    assert leave((run.watches[0], ("lost", "")), (run.watches[2], ("lost", ""))) == [message] * 2


@pytest.mark.parametrize("end", ["done", "left", "failed"])
def test_nobody_is_blamed_when_all_end_on_purpose_and_runs_do_not_mix(start, end):
    first = start(2)
    messages = leave(*((watch, (end, "SystemExit: 75")) for watch in first.watches))
    assert (messages == [None] * 2) == (end != "failed")
    second = start(2, store=first.store)
    time.sleep(1)
    assert second.messages == {}


class Gone:
    """The store of a process that has ended."""

    def __getattr__(self, name):
        raise dist.DistNetworkError("Connection reset by peer")


def test_rank_0_is_missed_when_its_store_is(start, monkeypatch):
    monkeypatch.setattr(rank_watch, "PATIENCE", 2.0)
    watch = (run := start(2)).watches[1]
    watch._group_store = SimpleNamespace(clone=Gone)
    watch._store = Gone()
    until(lambda: 1 in run.messages)
    assert run.messages[1].startswith("rank 0 was last heard of at step 3, 2 s ago")


def test_a_store_that_answers_again_ends_nothing(start):
    watch = (run := start(2)).watches[1]
    watch._store, count = Gone(), watch._heartbeat.beats
    until(lambda: run.watches[0]._ranks[1].heartbeat.beats > count + 2)
    assert not watch._store_is_gone
    assert run.messages == {}


def test_a_store_that_does_not_return_makes_rank_0_the_culprit_for_others_alone(start):
    run, stuck = start(2, timeout=3.0), threading.Event()
    for watch in run.watches:
        watch._store = SimpleNamespace(set=lambda *_: stuck.wait(60))
    until(lambda: 1 in run.messages)
    time.sleep(1)
    stuck.set()
    assert list(run.messages) == [1]
    assert run.messages[1].startswith("rank 0 was last heard of at step 3, 3 s ago")


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mistake_in_a_watch_ends_no_run(start, monkeypatch, capsys, number):
    run = start(2, timeout=3.0)
    monkeypatch.setattr(run.watches[number], "_judge", lambda: 1 / 0)
    until(lambda: not run.watches[number].is_alive())
    time.sleep(4)
    assert run.messages == {}
    assert f"rank {number} is watched no more: ZeroDivisionError" in capsys.readouterr().err


def test_time_in_which_the_process_stood_still_does_not_count(start, monkeypatch):
    run, real = start(2), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
    time.sleep(1)
    assert all(watch._now < 30 for watch in run.watches)
    monkeypatch.undo()
    assert run.messages == {}


# What is read of processes, threads and torch


def test_a_process_that_is_no_more_or_waits_to_be_noticed_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = _process_name().rpartition(" ")[0] + f" {child.pid}"
    assert not _has_died(name)
    child.stdin.close()
    until(lambda: _has_died(name))
    child.wait()
    assert _has_died(name)
    for alive in (_process_name(), f"another machine {child.pid}", ""):
        assert not _has_died(alive)


def test_the_location_of_a_thread_is_the_innermost_code_of_the_users_own():
    waits, go_on = threading.Event(), threading.Event()

    def wait():
        waits.set()
        go_on.wait()  # whose innermost frames are the standard library's

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    location = _location(thread.ident)
    go_on.set()
    thread.join()
    assert location.startswith(f"{__file__}:")
    assert location.endswith(" (wait)")


@pytest.mark.usefixtures("one_rank")
def test_what_is_asked_of_torch_is_there():
    dist.barrier()
    assert _count_collectives() == dist.group.WORLD._get_sequence_number_for_group() == 1
    assert dist.group.WORLD.get_group_store().clone() is not None
