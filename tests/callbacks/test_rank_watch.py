"""The rule that names a culprit; watches of several ranks as threads of one process.

Ranks that are processes and fail are in integration/test_rank_failures.py.
"""

import math
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lit_diffusion.callbacks import RankWatch, rank_watch
from lit_diffusion.callbacks.rank_watch import (
    PATIENCE,
    Heartbeat,
    _live_process,
    _Watch,
    find_culprit,
)
from lit_diffusion.signals import SavedOnSignal

TIMEOUT = 60.0
NOW = 1000.0

# The rule


def rank(silent=0.0, age=0.0, collectives=40, state="running"):
    """A rank that was heard of, and entered its last collective, so many seconds ago."""
    place = "at step 17, in train.py:3 (step)"
    return Heartbeat(9, collectives, place, "", state, "", NOW - silent, NOW - age)


def name_culprit(*ranks):
    """Number of the culprit and the message without it."""
    message = find_culprit(dict(enumerate(ranks)), NOW, TIMEOUT)
    if not message:
        return None
    _, number, text = message.split(maxsplit=2)
    assert text.endswith("; see its output.")
    return int(number), text


WAITS = rank(collectives=41, age=61.0)
DEAD = rank(silent=math.inf)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(), rank(silent=61)], (1, "was last heard of at step 17, in train.py:3 (step)")),
        ([rank(), Heartbeat(heard=NOW - 61)], (1, "was last heard of at step 0: killed")),
        (
            [WAITS, rank(age=300.0), WAITS],
            (1, "has kept the others waiting for 61 s at step 17, in train.py:3 (step)"),
        ),
        # The one furthest behind.
        ([WAITS, rank(collectives=40, age=99), rank(collectives=39, age=99)], (2, "has kept")),
        # A death outweighs what it did to the others.
        ([rank(age=99, collectives=39), DEAD, rank(state="lost"), WAITS], (1, "was last")),
    ],
)
def test_the_rank_that_ended_the_run_is_named(ranks, expected):
    number, text = name_culprit(*ranks)
    assert number == expected[0]
    assert text.startswith(expected[1])


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(), rank(silent=99, state="ended", age=99)],
        [rank(silent=TIMEOUT), rank()],
        [rank(age=5000.0), rank(age=5000.0)],  # all work alone, as in an FID
        [rank(age=5000.0), rank(collectives=41, age=59.0)],  # waited for, not too long
        [rank(age=59.0), rank(collectives=99, age=5000.0)],  # only just fell behind
        [rank(age=5000.0), rank(state="ended", age=5000.0, collectives=41)],
    ],
)
def test_a_rank_that_works_for_long_or_is_done_is_no_failure(ranks):
    assert name_culprit(*ranks) is None


def test_once_a_collective_has_broken_less_is_enough():
    for other, text in (
        (rank(silent=PATIENCE + 1), "was last heard of"),
        (rank(age=99.0), "has kept the others waiting for 6 s"),
    ):
        for state, culprit in (("running", None), ("lost", 1)):
            broken = rank(state=state, collectives=41, age=PATIENCE + 1)
            assert (name_culprit(broken, other) or (None, ""))[0] == culprit
        assert name_culprit(broken, other)[1].startswith(text)
    assert name_culprit(broken, rank(silent=PATIENCE), rank(age=PATIENCE)) is None
    assert name_culprit(rank(state="lost", age=PATIENCE), rank(silent=PATIENCE + 1)) is None


# The callback


@pytest.mark.parametrize("timeout", [2.9, float("nan")])
def test_a_time_too_short_for_signs_of_life_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be at least 3 seconds, got"):
        RankWatch(timeout)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]"), "lost"),
        (dist.DistNetworkError("Broken pipe"), "lost"),
        (RuntimeError("DataLoader timed out after 5 seconds"), "ended"),
        (SavedOnSignal(15, 3, "last.ckpt"), "ended"),
    ],
)
def test_the_verdict_goes_to_those_whose_collective_broke(monkeypatch, error, end):
    ends = []
    started = SimpleNamespace(leave=lambda state, _="": ends.append(state) or "rank 1 failed")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rank_watch, "_Watch", lambda trainer, timeout: started)
    watch = RankWatch(3.0)
    trainer = SimpleNamespace(world_size=2, global_rank=0, global_step=3)
    watch.on_exception(trainer, None, error)  # before a `setup`
    watch.teardown(trainer, None, "fit")
    assert ends == [end]
    assert watch.verdict == ("rank 1 failed" if end == "lost" else None)
    assert getattr(error, "__notes__", []) == ["rank 1 failed"] * (end == "lost")


# Watches


@pytest.fixture
def start(monkeypatch):
    """Starts the watches of a run; `messages` are what they would have ended their ranks by."""
    monkeypatch.setattr(rank_watch, "INTERVAL", 0.02)
    monkeypatch.setattr(rank_watch, "PATIENCE", 0.5)
    runs = []

    def start_run(size, timeout=60.0, store=None):
        run = SimpleNamespace(store=store or HashStore(), messages={}, watches=[])

        def end_process(code):
            watch = threading.current_thread()
            run.messages[watch._rank] = watch._beat.message

        monkeypatch.setattr(os, "_exit", end_process)
        group = SimpleNamespace(
            get_group_store=lambda: run.store, _get_sequence_number_for_group=lambda: 40
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        trainer = SimpleNamespace(global_step=3, strategy=SimpleNamespace(launcher=None))
        for number in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda number=number: number)
            run.watches.append(_Watch(trainer, timeout))
        runs.append(run)
        until(lambda: all(beat.beats for w in run.watches for beat in w._ranks.values()))
        return run

    yield start_run
    for watch in (watch for run in runs for watch in run.watches):
        watch._exchange = lambda store: False  # the last time
        watch._has_left.set()
        watch.join(20)
        assert not watch.is_alive()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def exchange_heartbeats(run, number=5):
    """Wait until rank 1 has sent rank 0 so many more."""
    count = run.watches[0]._ranks[1].beats
    until(lambda: run.watches[0]._ranks[1].beats > count + number)


def leave(*ends):
    """Watches that leave at the same time, each with what it reports; their messages."""
    messages = []
    threads = [
        threading.Thread(target=lambda w=w, end=end: messages.append(w.leave(*end)))
        for w, end in ends
    ]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    return messages


def test_all_hear_of_a_failure(start):
    run, message = start(3), "rank 1 failed at step 3: ValueError: bad; see its output."
    leave((run.watches[1], ("ended", message.removeprefix("rank 1 "))))
    until(lambda: run.messages.keys() >= {0, 2})
    assert {*run.messages.values()} == {message}


def test_ranks_whose_collective_broke_hear_of_the_failure(start):
    watches = start(3).watches
    ends = ("lost",), ("ended", "failed"), ("lost",)
    assert leave(*zip(watches, ends, strict=True)) == ["rank 1 failed"] * 3


def test_nobody_is_blamed_when_all_end_on_purpose_and_runs_do_not_mix(start):
    first = start(2)
    assert leave(*((watch, ("ended",)) for watch in first.watches)) == ["", ""]
    leave(*((watch, ("ended", "failed")) for watch in start(2, store=first.store).watches))
    exchange_heartbeats(third := start(2, store=first.store))
    assert third.messages == {}
    assert [watch._beat.message for watch in third.watches] == ["", ""]


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_rank_whose_process_dies_is_named_unless_it_had_ended(start, ends_well):
    run = start(3)
    watch = run.watches[2]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch._beat.process = _live_process(child.pid)
    assert str(child.pid) in watch._beat.process
    until(lambda: run.watches[0]._ranks[2].process == watch._beat.process)
    if ends_well:
        watch.leave("ended")
    child.stdin.close()
    until(lambda: not _live_process(child.pid))  # it is a zombie
    if ends_well:
        exchange_heartbeats(run)
        assert run.messages == {}
    else:
        until(lambda: run.messages.keys() >= {0, 1})
        assert run.messages[1].startswith("rank 2 was last heard of at step 3, in ")
    child.wait()


@pytest.mark.parametrize("has_ended", [False, True])
def test_rank_0_is_missed_when_its_store_is_unless_it_had_ended(start, has_ended):
    run = start(2)

    def raise_reset(store):
        raise dist.DistNetworkError("Connection reset by peer")

    if has_ended:
        run.watches[0]._state = "ended"
        until(lambda: run.watches[1]._ranks[0].state == "ended")
    run.watches[1]._exchange = raise_reset
    run.watches[1].join(10)
    text = "" if has_ended else "rank 0 was last heard of at step 3, in "
    assert run.messages.get(1, "")[: len(text) or None] == text


def test_a_store_that_does_not_return_makes_rank_0_the_culprit_of_a_broken_collective(start):
    run, stuck = start(2), threading.Event()
    run.watches[1]._exchange = lambda store: not stuck.wait(60)
    message = run.watches[1].leave("lost")
    stuck.set()
    assert message.startswith("rank 0 was last heard of at step 3, in ")


# What is read of processes, threads and torch


def test_the_place_of_a_rank_is_the_innermost_code_of_the_users_own(start):
    run, go_on = start(2), threading.Event()

    def wait():
        run.watches[1]._main_thread = threading.get_ident()
        go_on.wait()  # whose innermost frames are the standard library's

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: run.watches[0]._ranks[1].place.endswith(" (wait)"))
    assert run.watches[0]._ranks[1].place.startswith(f"at step 3, in {__file__}:")
    run.watches[1]._main_thread = threading.get_ident()
    exchange_heartbeats(run, 2)
    go_on.set()
    thread.join()


@pytest.mark.usefixtures("one_rank")
def test_torch_has_what_is_read_of_it():
    dist.barrier()
    watch = _Watch(SimpleNamespace(global_step=3), None)
    until(lambda: watch._beat.beats)
    until(lambda: watch._beat.collectives)
    assert watch._beat.collectives == dist.group.WORLD._get_sequence_number_for_group() == 1
    assert watch._beat.process.endswith(f" {os.getpid()}")
    assert watch._timeout > 60
    assert watch.leave("ended") == ""
