"""One of several ranks fails; the others end soon, with a message that names it."""

import os
import re
from datetime import timedelta

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy
from support.failing_ranks import STEP, WAYS
from support.pixels import PixelProtocol
from support.plain_module import make_trainer
from support.spawn import rank_and_size, run_ranks
from support.tiny_diffusion import images, tiny_diffusion
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.rank_watch import RankWatch

pytestmark = pytest.mark.system

RANKS = 3
FOREVER = 600.0  # seconds; a test whose limit is below does not wait for it


class Data(LightningDataModule):
    def __init__(self, fail_at, workers):
        super().__init__()
        self.fail_at, self.workers = fail_at, workers

    def setup(self, stage):
        self.fail_at("data")

    def train_dataloader(self):
        self.fail_at("loader")
        data = StuckDataset(images(60, 4).dataset, self.fail_at)
        return DataLoader(data, batch_size=4, num_workers=self.workers)

    def val_dataloader(self):
        return images(12, 4)


class StuckDataset(TensorDataset):
    """Reads from a file system that may not answer, in a loading process."""

    def __init__(self, data, fail_at):
        super().__init__(*data.tensors)
        self.fail_at = fail_at

    def __getitem__(self, index):
        if index > 20:
            self.fail_at("worker")
        return super().__getitem__(index)


class Failing(Callback):
    """Fails in training, in a validation, or on rank 0 where all ranks save a checkpoint."""

    def __init__(self, fail_at):
        self.fail_at = fail_at

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == STEP:
            self.fail_at("training")

    def on_validation_batch_start(self, trainer, *_):
        self.fail_at("validation")

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == STEP:
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "some.ckpt"))

    def on_save_checkpoint(self, trainer, *_):
        if trainer.is_global_zero:
            self.fail_at("save")


def train(folder, way, place, ranks, timeout, workers, gloo_timeout):
    """Train on each rank; `ranks` (all of them: None) fail in a way, at a place."""
    rank, size = rank_and_size()

    def fail_at(here):
        if here == place and (ranks is None or rank in ranks):
            WAYS[way]()

    module = tiny_diffusion()
    generate = module.generate

    def generate_or_fail(seeds, labels=None):
        fail_at("fid")
        return generate(seeds, labels)

    module.generate = generate_or_fail
    cache = str(folder / "cache")
    options = {"timeout": timedelta(seconds=gloo_timeout)} if gloo_timeout else {}
    trainer = make_trainer(
        folder,
        RankWatch(timeout),
        Failing(fail_at),
        FIDEvaluation(9, PixelProtocol([]), weights="raw", save_best=False, cache_dir=cache),
        devices=size,
        strategy=DDPStrategy(**options),
        max_epochs=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=Data(fail_at, workers))


@pytest.fixture
def run(tmp_path):
    def run(way, place, ranks, timeout, workers=0, gloo_timeout=None):
        """How the ranks ended of a run in which `ranks` fail."""
        options = timeout, workers, gloo_timeout
        return run_ranks(train, RANKS, tmp_path, way, place, ranks, *options, timeout=60)

    return run


def messages(end):
    """The lines that RankWatch printed."""
    return [line for line in end.output.splitlines() if re.match(r"(\[rank \d\] )?rank \d ", line)]


def assert_others_tell(ends, rank, message):
    """All ranks but this one ended with code 1 and the message; no process outlived its rank."""
    for other, end in enumerate(ends):
        assert not end.outlived
        if other != rank:
            assert end.exit_code == 1, end.output
            assert re.search(message, messages(end)[-1])


@pytest.mark.parametrize(
    ("way", "rank", "place"),
    [
        *(("raise", *at) for at in ((2, "data"), (0, "training"), (2, "fid"), (0, "save"))),
        *(("kill", *at) for at in ((0, "data"), (2, "loader"), (2, "training"), (0, "validation"))),
    ],
)
def test_a_rank_that_fails_is_named(run, way, rank, place):
    ends = run(way, place, [rank], timeout=FOREVER)
    message = (
        f"failed at step {STEP if place == 'training' else '.'}: ValueError: no such label; see"
    )
    if way == "kill":  # one that dies before it is watched is only missed
        message = "was last heard of at step .*: killed"
    assert_others_tell(ends, rank, f"rank {rank} {message}")
    assert ends[rank].exit_code == (1 if way == "raise" else -9)
    assert messages(ends[rank]) == []


@pytest.mark.parametrize(("rank", "place"), [(2, "training"), (0, "save")])
def test_a_rank_that_hangs_is_named_with_its_place_and_ends_too(run, rank, place):
    ends = run("sleep", place, [rank], timeout=4.0)
    message = rf"rank {rank} has kept the others waiting for \d s at step ., in .*failing_ranks.py"
    assert_others_tell(ends, rank, message)
    assert ends[rank].exit_code == 1


def test_a_rank_that_stands_still_is_named(run):
    """It can't end by itself; who started it kills it, as torchrun, srun and Lightning do."""
    ends = run("stop", "training", [2], timeout=4.0)
    assert_others_tell(ends, 2, r"rank 2 was last heard of at step \d, in")
    assert ends[2].exit_code is None


@pytest.mark.parametrize(
    ("way", "place", "code"),
    [("kill", "training", -9), ("sleep", "training", 1), ("sleep", "worker", 1)],
)
def test_loading_processes_end_with_their_rank(run, way, place, code):
    """Also those of other ranks, and stuck ones, which the main thread waits for."""
    ends = run(way, place, [1], timeout=4.0, workers=2)
    assert_others_tell(ends, 1, "rank 1 ")
    assert ends[1].exit_code == code


def test_ranks_that_work_alone_for_long_are_not_taken_for_dead(run):
    """All generate for longer than the timeout; nobody waits for another."""
    ends = run("work", "fid", None, timeout=4.0)
    assert [(end.exit_code, messages(end)) for end in ends] == [(0, [])] * RANKS


@pytest.mark.parametrize(
    ("way", "code", "place"), [("leave", 75, "training"), ("interrupt", 1, "validation")]
)
def test_an_end_on_purpose_is_no_failure(run, way, code, place):
    ends = run(way, place, None, timeout=FOREVER)
    assert [(end.exit_code, messages(end)) for end in ends] == [(code, [])] * RANKS


def test_ranks_that_make_the_same_mistake_tell_only_that(run):
    ends = run("raise", "loader", None, timeout=FOREVER)
    assert [(end.exit_code, messages(end)) for end in ends] == [(1, [])] * RANKS
    assert all(end.output.rstrip().endswith("ValueError: no such label") for end in ends)


def test_when_the_collectives_time_out_first_the_rank_that_hung_is_named(run):
    ends = run("sleep", "training", [1], timeout=None, gloo_timeout=8)
    assert_others_tell(ends, 1, r"rank 1 has kept the others waiting for \d+ s at step 3")
