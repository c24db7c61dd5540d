import inspect

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion.cli.lightning_internals import (
    is_row_pending,
    restore_unsaved_state,
    save_intervals,
    saved_files,
    unsaved_state,
)


@pytest.mark.parametrize(
    ("hook", "batches"),
    [
        ("on_train_batch_end", [2, 4, 5, 7, 9, 10]),
        ("on_train_batch_start", []),
        ("on_before_zero_grad", []),
        ("on_validation_end", []),
    ],
)
def test_the_row_of_a_step_is_pending_at_the_end_of_its_batch_only(tmp_path, hook, batches):
    calls, pending = [], []

    def ask(trainer, *_):
        calls.append(None)
        if is_row_pending(trainer):
            pending.append(len(calls))

    callback = Callback()
    setattr(callback, hook, ask)
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
    make_trainer(tmp_path, callback, **options).fit(PlainModule(), loader(40), loader(16))
    assert pending == batches


def test_the_private_names_of_lightning_are_of_the_kind_that_is_used():
    def parameters(function):
        return list(inspect.signature(function).parameters)

    trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    assert parameters(LightningCLI._get)[:3] == ["self", "config", "key"]
    assert parameters(LightningCLI._dump_config) == ["self"]
    assert parameters(LightningCLI._parse_ckpt_path) == ["self"]
    assert parameters(LightningCLI._run_subcommand) == ["self", "subcommand"]
    assert parameters(LightningCLI._prepare_subcommand_kwargs) == ["self", "subcommand"]
    assert isinstance(trainer._logger_connector._callback_metrics, dict)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
    assert trainer.fit_loop._restarting is False
    assert trainer._accelerator_connector.cluster_environment is not None
    assert save_intervals(ModelCheckpoint(every_n_train_steps=7)) == (7, 0, False)


def test_what_lightning_does_not_restore_of_a_model_checkpoint_is_told_and_taken_up(tmp_path):
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss")
    make_trainer(tmp_path, keeper, enable_checkpointing=True).fit(PlainModule(), loader(), loader())
    state = unsaved_state(keeper)
    assert state["_last_global_step_saved"] == 4
    again = ModelCheckpoint(tmp_path, monitor="val_loss")
    restore_unsaved_state(again, state)
    assert unsaved_state(again) == state
    [file] = saved_files(keeper)
    assert file == keeper.best_model_path
