"""The rule that names a culprit; watches of several ranks as threads of one process.

Ranks that are processes and fail are in integration/test_rank_failures.py.
"""

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


def rank(silent=0.0, age=0.0, collectives=40, state="running"):
    """A rank that was heard of, and entered its last collective, so many seconds ago."""
    place, heard = "train.py:3 (step)", NOW - silent
    return Heartbeat(9, 17, collectives, age, place, state=state, heard=heard)


def name_culprit(*ranks, lost=False):
    """Number of the culprit and the message without it."""
    message = find_culprit(dict(enumerate(ranks)), NOW, TIMEOUT, lost)
    if not message:
        return None
    _, number, text = message.split(maxsplit=2)
    assert text.endswith("; see its output.")
    return int(number), text


WAITS = rank(collectives=41, age=61.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(), rank(silent=61)], (1, "was last heard of at step 17, 61 s ago")),
        ([rank(), Heartbeat(heard=NOW - 61)], (1, "was last heard of at step 0, 61 s ago")),
        (
            [WAITS, rank(age=300.0), WAITS],
            (1, "has kept the others waiting for 61 s at step 17, in train.py:3 (step)"),
        ),
        ([rank(), rank(state="died")], (1, "ended without a word, last heard of at step 17")),
        # The first of those that ended alike, the longest silent, the one furthest behind.
        ([rank(), rank(1, state="died"), rank(2, state="died")], (2, "ended")),
        ([rank(), rank(silent=61), rank(silent=99)], (2, "was last")),
        ([WAITS, rank(collectives=40, age=99), rank(collectives=39, age=99)], (2, "has kept")),
        # A death outweighs what it did to the others.
        ([rank(silent=99), rank(state="died"), rank(state="lost"), WAITS], (1, "ended")),
        ([rank(silent=61), rank(age=99), rank(state="lost"), WAITS], (0, "was last")),
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
    broken = rank(state="lost", collectives=41, age=PATIENCE + 1)
    for other, text in (
        (rank(silent=PATIENCE + 1), "was last heard of"),
        (rank(age=99.0), "has kept the others waiting for 6 s"),
        (rank(state="ended"), "ended at step 17 without the others"),
    ):
        assert name_culprit(broken, other) is None
        number, message = name_culprit(broken, other, lost=True)
        assert (number, message.startswith(text)) == (1, True)
    assert name_culprit(broken, rank(silent=PATIENCE), rank(age=PATIENCE), lost=True) is None


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
    monkeypatch.setattr(_Watch, "_end_process", lambda w: w.ended.update({w._rank: w._message}))
    runs = []

    def start_run(size, timeout=60.0, store=None):
        run = SimpleNamespace(store=store or HashStore(), messages={}, watches=[])
        monkeypatch.setattr(_Watch, "ended", run.messages, raising=False)
        group = SimpleNamespace(
            get_group_store=lambda: run.store, _get_sequence_number_for_group=lambda: 40
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        for number in range(size):
            monkeypatch.setattr(dist, "get_rank", lambda number=number: number)
            run.watches.append(_Watch(SimpleNamespace(global_step=3), timeout))
        runs.append(run)
        until(lambda: all(beat.beats for w in run.watches for beat in w._ranks.values()))
        return run

    yield start_run
    for watch in (watch for run in runs for watch in run.watches):
        watch._is_closing.set()
        for thread in watch._threads:
            thread.join(20)
            assert not thread.is_alive()


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
    leave((run.watches[1], ("ended", message)))
    until(lambda: run.messages.keys() >= {0, 2})
    assert {*run.messages.values()} == {message}
    assert leave((run.watches[0], ("lost",)), (run.watches[2], ("lost",))) == [message] * 2


def test_nobody_is_blamed_when_all_end_on_purpose_and_runs_do_not_mix(start):
    first = start(2)
    assert leave(*((watch, ("ended",)) for watch in first.watches)) == ["", ""]
    leave(*((watch, ("ended", "rank 0 failed")) for watch in start(2, store=first.store).watches))
    exchange_heartbeats(third := start(2, store=first.store))
    assert third.messages == {}


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_rank_whose_process_dies_is_named_unless_it_had_ended(start, ends_well):
    run = start(3)
    watch = run.watches[2]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = _process_name().rpartition(" ")[0] + f" {child.pid}"
    while run.watches[0]._ranks[2].process != process:
        watch._own.process = process
        time.sleep(0.01)
    if ends_well:
        watch.leave("ended")
    child.stdin.close()
    until(lambda: _has_died(process))  # it is a zombie
    if ends_well:
        exchange_heartbeats(run)
        assert run.messages == {}
    else:
        until(lambda: run.messages.keys() >= {0, 1})
        assert run.messages[1].startswith("rank 2 ended without a word, last heard of at step 3")
    child.wait()


class Gone:
    """The store of a process that has ended; it may not answer before an event."""

    def __init__(self, event=None):
        self.event = event

    def __getattr__(self, name):
        if self.event is not None:
            self.event.wait(60)
        raise dist.DistNetworkError("Connection reset by peer")


def test_rank_0_is_missed_when_its_store_is(start):
    watch = (run := start(2)).watches[1]
    run.store, watch._store = Gone(), Gone()
    until(lambda: 1 in run.messages)
    assert run.messages[1].startswith("rank 0 was last heard of at step 3")


def test_a_store_that_answers_again_ends_nothing(start):
    watch = (run := start(2)).watches[1]
    watch._store = Gone()
    exchange_heartbeats(run)
    assert not watch._is_store_gone
    assert run.messages == {}


def test_a_store_that_does_not_return_makes_rank_0_the_culprit_for_others_alone(start):
    run, stuck = start(2, timeout=0.4), threading.Event()
    for watch in run.watches:
        watch._store = Gone(stuck)
    until(lambda: 1 in run.messages)
    time.sleep(0.2)
    stuck.set()
    assert list(run.messages) == [1]
    assert run.messages[1].startswith("rank 0 was last heard of at step 3, 0 s ago")


# What is read of processes, threads and torch


def test_processes_that_live_or_are_unknown_are_not_dead():
    for alive in (_process_name(), "another machine 1000000", ""):
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
def test_torch_has_what_is_read_of_it():
    dist.barrier()
    watch = _Watch(SimpleNamespace(global_step=3), None)
    until(lambda: watch._own.beats)
    assert watch._own.collectives == dist.group.WORLD._get_sequence_number_for_group() == 1
    assert watch._own.process.endswith(f" {os.getpid()}")
    assert watch._timeout > 60
    assert watch.leave("ended") == ""
