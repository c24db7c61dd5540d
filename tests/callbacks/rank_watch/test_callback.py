"""Watches of several ranks as threads of one process, over a real store, and what each rank does.

Ranks that fail are in integration/test_rank_failures.py.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.plain_module import PlainModule, loader, make_trainer
from torch.distributed import HashStore, PrefixStore

from lit_diffusion.callbacks import RankWatch
from lit_diffusion.callbacks.rank_watch.callback import (
    BEAT,
    RunWatch,
    collectives,
    has_died,
    how_it_ended,
    in_a_line,
    this_process,
    where,
)
from lit_diffusion.callbacks.rank_watch.verdict import RankVerdict
from lit_diffusion.signals import SavedOnSignal


@pytest.mark.parametrize("timeout", [0, -1.0, 2.9, float("nan")])
def test_a_time_too_short_for_signs_of_life_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be at least 3 seconds, got"):
        RankWatch(timeout)


def test_a_single_rank_is_left_alone(tmp_path):
    threads = threading.active_count()
    watch = RankWatch()
    make_trainer(tmp_path, watch).fit(PlainModule(), loader())
    assert threading.active_count() == threads
    assert watch.verdict is None


def test_an_error_on_a_single_rank_is_as_it_was(tmp_path):
    class Failing(PlainModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("[gloo] Connection closed by peer")

    with pytest.raises(RuntimeError) as raised:
        make_trainer(tmp_path, RankWatch()).fit(Failing(), loader())
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]"), "lost"),
        (RuntimeError("NCCL communicator was aborted on rank 1."), "lost"),
        (dist.DistNetworkError("Broken pipe"), "lost"),
        (RuntimeError("DataLoader timed out after 5 seconds"), "failed"),
        (RuntimeError("CUDA out of memory"), "failed"),
        (ValueError("gloomy"), "failed"),
        (SystemExit(1), "left"),
        (KeyboardInterrupt(), "left"),
    ],
)
def test_ends_are_told_apart(error, kind):
    assert how_it_ended(error) == kind


def test_a_run_that_was_saved_on_a_signal_left_on_purpose():
    assert issubclass(SavedOnSignal, SystemExit)


def test_an_exception_is_told_in_a_line_of_some_length():
    assert in_a_line(ValueError("bad\n  value")) == "ValueError: bad value"
    assert len(in_a_line(ValueError("x" * 10_000))) == 300


def test_a_watch_that_cannot_begin_ends_no_run_and_hides_no_error(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    trainer = SimpleNamespace(world_size=2)
    watch = RankWatch()
    watch.setup(trainer, None, "fit")
    watch.on_exception(trainer, None, ValueError("bad"))
    watch.teardown(trainer, None, "fit")
    assert "this rank is not watched: " in capsys.readouterr().err


@pytest.fixture
def watched(monkeypatch):
    """What the watches of one of two ranks are told, in order; the verdict of each is FOUND."""
    told = []

    class Told:
        def __init__(self, trainer, timeout):
            told.append(timeout)

        def meet(self):
            told.append("meet")

        def leave(self, *end):
            told.append(end)
            return RankVerdict(1, FOUND)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr("lit_diffusion.callbacks.rank_watch.callback.RunWatch", Told)
    return told


FOUND, TWO = "rank 1 failed at step 3", SimpleNamespace(world_size=2)


def test_a_rank_meets_the_others_and_leaves_once_for_each_run(watched):
    watch = RankWatch(3.0)
    for _ in range(2):
        watch.setup(TWO, None, "fit")
        watch.teardown(TWO, None, "fit")
        watch.teardown(TWO, None, "fit")
    assert watched == [3.0, "meet", ("done",)] * 2
    watch.setup(SimpleNamespace(world_size=1), None, "fit")
    assert len(watched) == 6


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    ("kind", "end"), [(RuntimeError, "lost"), (ValueError, "failed"), (SystemExit, "left")]
)
def test_an_end_is_told_and_gets_the_verdict_where_the_others_were_lost(watched, kind, end, begun):
    watch, error = RankWatch(), kind("NCCL is gone")
    if begun:
        watch.setup(TWO, None, "fit")
    watch.on_exception(TWO, None, error)
    watch.teardown(TWO, None, "fit")
    assert watched == [None, "meet", (end, f"{kind.__name__}: NCCL is gone")]
    assert watch.verdict == (FOUND if end == "lost" else None)
    assert getattr(error, "__notes__", []) == [FOUND] * (end == "lost")


def test_it_can_be_sent_to_processes_that_are_spawned():
    assert pickle.loads(pickle.dumps(RankWatch(5.0))).timeout == 5.0


class Broken:
    """A connection to a store whose host is gone."""

    def __getattr__(self, name):
        raise dist.DistNetworkError("Connection reset by peer")


class Run:
    """Ranks of a run; `acted` is what their watches would have ended them by."""

    def __init__(self, monkeypatch, ranks, timeout=60.0):
        self.monkeypatch, self.size, self.timeout = monkeypatch, ranks, timeout
        self.store, self.acted = HashStore(), {}
        monkeypatch.setattr(RunWatch, "_act", lambda w, v: self.acted.update({w._rank: v}))
        group = SimpleNamespace(
            get_group_store=lambda: self.store, _get_sequence_number_for_group=lambda: 40
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        self.watches = [self.start(rank) for rank in range(ranks)]
        until(lambda: all(s.word.beat for w in self.watches for s in w._seen.values()))

    def start(self, rank):
        self.monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return RunWatch(SimpleNamespace(global_step=3), self.timeout)

    def keys(self, run=1):
        return PrefixStore(f"rank_watch/{run}", self.store)

    def end(self):
        for watch in self.watches:
            watch._is_closing.set()
            watch.join(20)
            assert not watch.is_alive()


@pytest.fixture
def ranks(monkeypatch):
    runs = []

    def start(number, **options):
        runs.append(Run(monkeypatch, number, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave(watch, *end):
    """In a thread, as ranks leave at the same time; the found verdict is added to a list."""
    found = []
    thread = threading.Thread(target=lambda: found.append(watch.leave(*end)))
    thread.start()
    return thread, found


def test_all_hear_of_a_failure(ranks):
    run = ranks(3)
    thread, found = leave(run.watches[1], "failed", "ValueError: bad")
    until(lambda: len(run.acted) == 3)
    thread.join(30)
    text = "rank 1 failed at step 3: ValueError: bad; see its output."
    assert set(run.acted.values()) == {RankVerdict(1, text)} == set(found)


@pytest.mark.parametrize("end", ["done", "left"])
def test_nobody_is_blamed_when_all_end_on_purpose(ranks, end):
    run = ranks(3)
    threads = [leave(watch, end, "SystemExit: 75") for watch in run.watches]
    for thread, found in threads:
        thread.join(30)
        assert found == [None]
    assert not any(watch.is_alive() for watch in run.watches)
    assert run.acted == {}


def test_runs_of_one_process_do_not_hear_of_each_other(ranks):
    first = ranks(2)
    for thread, _ in [leave(watch, "left", "SystemExit: 75") for watch in first.watches]:
        thread.join(30)
    second = ranks(2)
    second.store = first.store
    time.sleep(4 * BEAT)
    assert second.acted == {}
    assert json.loads(first.keys().get("1"))[5] == "left"


def test_rank_0_is_missed_when_its_store_is(ranks):
    run = ranks(2)
    one = run.watches[1]
    one._group_store = SimpleNamespace(clone=Broken)
    one._store = Broken()
    until(lambda: 1 in run.acted)
    assert run.acted[1].text.startswith("rank 0 was last heard of at step 3, 5 s ago")


def test_a_store_that_answers_again_ends_nothing(ranks):
    run = ranks(2)
    one = run.watches[1]
    one._store = Broken()
    beat = one._last.beat
    until(lambda: run.watches[0]._seen[1].word.beat > beat + 2)
    assert not one._is_broken
    assert run.acted == {}


def test_a_store_that_stands_still_is_told_after_the_timeout(ranks):
    run = ranks(2, timeout=3.0)
    stuck = threading.Event()
    run.watches[1]._store = SimpleNamespace(set=lambda *_: stuck.wait(60))
    until(lambda: 1 in run.acted)
    stuck.set()
    assert run.acted[1].text.startswith("rank 0 was last heard of at step 3, 3 s ago")


def test_rank_0_blames_nobody_while_it_does_not_hear_of_itself(ranks):
    run = ranks(1, timeout=3.0)
    stuck = threading.Event()
    zero = run.watches[0]
    zero._seen[1] = zero._seen[0]
    zero._store = SimpleNamespace(set=lambda *_: stuck.wait(60))
    time.sleep(4)
    assert run.acted == {}
    stuck.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_in_a_watch_ends_no_run(ranks, monkeypatch, capsys, rank):
    run = ranks(2, timeout=3.0)
    monkeypatch.setattr(run.watches[rank], "_judged", lambda: 1 / 0)
    run.watches[rank].join(20)
    assert not run.watches[rank].is_alive()
    time.sleep(4)
    assert run.acted == {}
    assert f"rank {rank} is watched no more: ZeroDivisionError" in capsys.readouterr().err


def test_time_in_which_the_process_stood_still_does_not_count(ranks, monkeypatch):
    run = ranks(2)
    real, before = time.monotonic, [watch._now for watch in run.watches]
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
    time.sleep(4 * BEAT)
    assert all(watch._now - then < 30 for watch, then in zip(run.watches, before, strict=True))
    monkeypatch.undo()
    assert run.acted == {}


def test_a_process_that_is_no_more_or_waits_to_be_noticed_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = this_process().rpartition(" ")[0] + f" {child.pid}"
    assert not has_died(name)
    child.stdin.close()
    until(lambda: has_died(name))
    child.wait()
    assert has_died(name)
    assert not has_died(this_process())
    assert not has_died(f"another machine {child.pid}")
    assert not has_died("")


def test_the_place_of_a_thread_is_the_innermost_code_of_the_users_own():
    waits, go_on = threading.Event(), threading.Event()

    def wait():
        waits.set()
        go_on.wait()  # whose innermost frames are the standard library's

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    here = where(thread.ident)
    go_on.set()
    thread.join()
    assert here.startswith(f"{__file__}:")
    assert here.endswith(" (wait)")
    assert where(thread.ident) == ""


def test_what_is_asked_of_torch_is_there(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        dist.barrier()
        assert collectives() == dist.group.WORLD._get_sequence_number_for_group() == 1
        assert dist.group.WORLD.get_group_store().clone() is not None
    finally:
        dist.destroy_process_group()
    assert collectives() == 0
    assert os.getpid() == int(this_process().split()[-1])
