import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.plain_module import assert_same_bits
from support.saving import fit
from support.tiny_run import TinyData, TinyModule, TinyNet, TwoOptimizers
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.cli.exact_resume import BETWEEN_BATCHES, ExactResume
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_rows


class SaveAt(pl.Callback):
    """Saves in a hook, after a number of batches."""

    def __init__(self, file, hook, batch):
        self.file, self.batch = file, batch
        setattr(self, hook, self.save)

    def save(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize(
    ("hook", "batch", "options", "reason"),
    [
        ("on_train_batch_end", 2, {}, "before the validation of its step, which the resume skips"),
        ("on_train_batch_end", 3, {}, None),
        ("on_validation_end", 2, {}, None),
        ("on_train_epoch_end", 4, {}, "at the end of an epoch"),
        ("on_train_end", 8, {}, None),
        ("on_train_batch_end", 2, {"accumulate_grad_batches": 3}, BETWEEN_BATCHES),
        ("on_train_batch_end", 3, {"accumulate_grad_batches": 3}, None),
        ("on_validation_end", 2, {"accumulate_grad_batches": 3}, BETWEEN_BATCHES),
    ],
)
def test_a_file_from_which_a_run_would_not_go_on_as_it_was_says_so(
    tmp_path, hook, batch, options, reason
):
    options = {"max_epochs": 2, "max_steps": -1, "val_check_interval": 2, **options}
    file = tmp_path / "some.ckpt"
    fit(SaveAt(file, hook, batch), tmp_path, callbacks=[ExactResume()], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused = reason == BETWEEN_BATCHES
        refusal = pytest.raises(ValueError, match=rf"some\.ckpt was saved {reason}")
        with refusal if refused else nullcontext():
            fit(ExactResume(), tmp_path, ckpt_path=file, **options | {"max_epochs": 3})
    warned = [str(w.message) for w in caught if "some.ckpt was saved" in str(w.message)]
    assert len(warned) == (reason is not None and not refused)
    assert all(f"some.ckpt was saved {reason}" in text for text in warned)


def logged_fit(folder, max_steps, ckpt_path=None, module=None, **options):
    trainer = pl.Trainer(
        max_steps=max_steps,
        callbacks=[ExactResume(), LastCheckpoint(folder)],
        logger=AppendingCSVLogger(folder),
        default_root_dir=folder,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=False,
        accelerator="cpu",
        **options,
    )
    module = module or TinyModule(TinyNet(3), torch.optim.Adam)
    trainer.fit(module, TinyData(), ckpt_path=ckpt_path)  # 4 batches an epoch
    return trainer


class Plateau(TinyModule):
    """Halves its lr every `frequency` epochs or steps, whatever the loss."""

    def __init__(self, interval, frequency=1):
        torch.manual_seed(0)
        super().__init__(TinyNet(3), torch.optim.Adam)
        self.when = {"interval": interval, "frequency": frequency, "monitor": "train/loss"}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        never = {"threshold": 1e3, "threshold_mode": "abs"}
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **never)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.when}}


@pytest.mark.parametrize("when", [("epoch",), ("epoch", 2), ("step", 3)])
def test_a_run_that_is_prolonged_has_the_lr_of_one_that_was_as_long(tmp_path, when):
    """Where it ended with an epoch, Lightning has left the update of that out too."""
    options = {"limit_val_batches": 0}
    whole = logged_fit(tmp_path / "whole", 20, module=Plateau(*when), **options)
    assert whole.optimizers[0].param_groups[0]["lr"] < 0.1
    for end in (3, 4, 8):
        folder = tmp_path / str(end)
        logged_fit(folder, end, module=Plateau(*when), **options)
        again = logged_fit(folder, 20, folder / "last.ckpt", Plateau(*when), **options)
        assert_same_bits(again.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
        assert_same_bits(again.model.state_dict(), whole.model.state_dict())


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
        content = {file.name: torch.load(file, weights_only=True) for file in LAST.parent.iterdir()}
        for file in list(LAST.parent.iterdir()):
            file.unlink()
        return content

    return run, done


@pytest.mark.quick
@pytest.mark.parametrize(
    "keeper",
    [
        {"every_n_train_steps": 1, "save_top_k": -1},
        {"every_n_train_steps": 2},
        {"monitor": "train/loss", "every_n_train_steps": 1, "save_top_k": 2, "filename": "best"},
        {"monitor": "val/loss", "every_n_train_steps": 1, "save_top_k": 2},
        {"monitor": "val/loss", "save_top_k": 3},
        {"every_n_epochs": 1},
    ],
    ids=lambda keeper: "+".join(keeper),
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 3},
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 1},  # which a resume leaves out
    ],
)
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
    files = done()
    assert files["mine.ckpt"] == {"global_step": 2}
    assert files["mine-v1.ckpt"]["global_step"] == 5


# Curves and counts


def training_steps(folder):
    return [row["step"] for row in read_rows(folder / "metrics.csv") if "train/loss" in row]


def test_rows_are_deleted_by_the_steps_they_are_logged_at_not_by_those_of_all_optimizers(tmp_path):
    def run(max_steps, ckpt_path=None):
        module = TwoOptimizers(TinyNet(3), torch.optim.Adam)
        logged_fit(tmp_path, max_steps, ckpt_path, module)

    run(12)
    early = (tmp_path / "last.ckpt").read_bytes()
    run(16, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes(early)  # died before the next save
    run(16, tmp_path / "last.ckpt")
    assert training_steps(tmp_path) == [str(step) for step in range(8)]


@pytest.mark.parametrize("images", [[1], "abc", [1, 2, "many"], [1, 2, True]])
def test_counts_of_images_that_are_none_are_refused(images):
    with pytest.raises(ValueError, match="images_seen must be three counts"):
        ExactResume().on_load_checkpoint(None, None, {"images_seen": images})


@pytest.mark.parametrize("file", ["{}/../x", "s3://bucket/x", 3])
def test_a_checkpoint_names_no_file_elsewhere_for_deletion(tmp_path, file):
    def savers():
        return ModelCheckpoint(tmp_path / "saved"), LastCheckpoint(tmp_path)

    fit(savers()[1], tmp_path, callbacks=[savers()[0], ExactResume()], max_steps=2)
    content = torch.load(tmp_path / "last.ckpt")
    (key,) = content["model_checkpoints"]
    name = file if isinstance(file, int) else file.format(tmp_path / "saved")
    content["callbacks"][key]["best_model_path"] = name
    torch.save(content, tmp_path / "last.ckpt")
    callbacks = [savers()[0], ExactResume()]
    with pytest.raises(ValueError, match="would delete it, but its folder is"):
        fit(savers()[1], tmp_path, tmp_path / "last.ckpt", callbacks=callbacks, max_steps=4)
