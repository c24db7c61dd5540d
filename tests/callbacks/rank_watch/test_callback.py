"""What a rank does with it on its own; ranks that fail are in integration/test_rank_failures.py."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion.callbacks import RankWatch
from lit_diffusion.callbacks.rank_watch.callback import how_it_ended, in_a_line
from lit_diffusion.callbacks.rank_watch.verdict import RankVerdict
from lit_diffusion.system.signals import SavedOnSignal


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
