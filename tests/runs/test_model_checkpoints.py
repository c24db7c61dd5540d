from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.plain_module import assert_same_bits
from support.saving import fit

from lit_diffusion.runs.exact_resume import ExactResume
from lit_diffusion.runs.last_checkpoint import LastCheckpoint

LAST = Path("checkpoints/last.ckpt")


class Death(Exception):
    """What a run dies of."""


class DieAt(pl.Callback):
    """Dies in a batch, before any of its optimizer steps counts."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            raise Death


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Fits in a folder of the same path each time, which `done` gives another name."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(keeper, *others, ckpt_path=None, **options):
        others = [*others, ExactResume(), keeper()]
        last = LastCheckpoint("checkpoints", first=3, every_n_seconds=1000.0)
        fit(last, Path(), ckpt_path, others, **options)

    def done():
        found = {file.name: torch.load(file, weights_only=True) for file in LAST.parent.iterdir()}
        for file in list(LAST.parent.iterdir()):
            file.unlink()
        return found

    return run, done


@pytest.mark.parametrize(
    "keeper",
    [
        {"every_n_train_steps": 1, "save_top_k": -1},
        {"every_n_train_steps": 1, "save_top_k": -1, "filename": "kept"},
        {"every_n_train_steps": 2},
        {"monitor": "train/loss", "every_n_train_steps": 1, "save_top_k": 2, "filename": "best"},
        {"monitor": "val/loss", "every_n_train_steps": 1, "save_top_k": 2},
        {"monitor": "val/loss", "save_top_k": 3},
        {"every_n_epochs": 1},
    ],
    ids=lambda keeper: "+".join(keeper),
)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 3}])
@pytest.mark.parametrize("batch", [7, 9])
def test_a_run_that_died_ends_with_the_files_and_states_of_one_that_did_not(
    run, keeper, options, batch
):
    """They were saved again beside the old ones, as -v1, and by other metrics."""
    run, done = run
    keeper = partial(ModelCheckpoint, "checkpoints", **keeper)
    run(keeper, max_steps=9, **options)
    whole = done()
    with pytest.raises(Death):
        run(keeper, DieAt(batch), max_steps=9, **options)
    run(keeper, max_steps=9, ckpt_path=LAST, **options)
    assert_same_bits(done(), whole)


def test_a_strangers_file_of_the_same_name_stays(run):
    """A checkpoint of an earlier step is nobody's who was interrupted after the restored one."""
    run, done = run
    keeper = partial(ModelCheckpoint, "checkpoints", filename="mine", every_n_train_steps=5)
    with pytest.raises(Death):
        run(keeper, DieAt(4))
    torch.save({"global_step": 2}, "checkpoints/mine.ckpt")
    run(keeper, ckpt_path=LAST, max_steps=5)
    found = done()
    assert found["mine.ckpt"] == {"global_step": 2}
    assert found["mine-v1.ckpt"]["global_step"] == 5
