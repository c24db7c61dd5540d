import inspect

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion import trainer_state

FUNCTIONS = ("accumulates", "validation_follows", "is_ending", "row_is_to_come")


class Asks(Callback):
    """What each function says, by the number of the batch."""

    def __init__(self, hook):
        self.said = {name: [] for name in FUNCTIONS}
        self.batches = 0
        setattr(self, hook, self._ask)

    def _ask(self, trainer, *args):
        self.batches += 1
        for name in FUNCTIONS:
            if getattr(trainer_state, name)(trainer):
                self.said[name].append(self.batches)


def said(tmp_path, hook="on_train_batch_end", **options):
    """Of two epochs of five batches."""
    asks = Asks(hook)
    trainer = make_trainer(tmp_path, asks, **{"max_epochs": 2, **options})
    trainer.fit(PlainModule(), loader(40), loader(16))
    return asks.said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ([], [5, 10], [10])),
        ({"accumulate_grad_batches": 2}, ([1, 3, 6, 8], [5, 10], [10])),
        ({"val_check_interval": 2}, ([], [2, 4, 7, 9], [10])),
        ({"limit_val_batches": 0, "max_epochs": -1, "max_steps": 7}, ([], [], [7])),
        ({"check_val_every_n_epoch": 2}, ([], [10], [10])),
    ],
)
def test_batches_whose_gradients_wait_that_validation_follows_and_that_are_the_last(
    tmp_path, options, expected
):
    assert tuple(said(tmp_path, **options).values())[:3] == expected


def test_the_row_of_a_step_is_to_come_at_the_end_of_its_batch_only(tmp_path):
    steps = [2, 4, 5, 7, 9, 10]
    assert said(tmp_path, accumulate_grad_batches=2)["row_is_to_come"] == steps
    for hook in ("on_train_batch_start", "on_before_zero_grad", "on_validation_end"):
        assert said(tmp_path, hook, num_sanity_val_steps=0)["row_is_to_come"] == []


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"max_steps": 7, "max_epochs": None}, 7),
        ({"max_steps": 7, "max_epochs": 1}, 5),
        ({"max_epochs": 2}, 10),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4),
        ({"max_epochs": 2, "limit_train_batches": 2}, 4),
    ],
)
def test_the_total_is_the_number_of_steps_that_the_run_takes(tmp_path, options, total):
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(PlainModule(), loader(40))
    assert trainer_state.steps_of_run(trainer) == trainer.global_step == total


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_private_functions_of_lightning_take_what_they_are_called_with():
    trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    loop = trainer.fit_loop.epoch_loop
    assert parameters(loop._should_accumulate) == []
    assert parameters(loop._should_check_val_fx) == ["data_fetcher"]
    assert parameters(trainer._signal_connector.register_signal_handlers) == []
    assert {"model", "datamodule"} <= {*parameters(trainer._data_connector.attach_data)}
    assert parameters(_parse_num_batches) == ["stage", "length", "limit_batches"]
    assert parameters(LightningCLI._get)[:3] == ["self", "config", "key"]
    assert parameters(LightningCLI._dump_config) == ["self"]
    assert parameters(LightningCLI._parse_ckpt_path) == ["self"]
    assert parameters(LightningCLI._run_subcommand) == ["self", "subcommand"]
    assert parameters(LightningCLI._prepare_subcommand_kwargs) == ["self", "subcommand"]


def test_the_private_state_of_lightning_is_of_the_kind_that_is_read():
    trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    assert PlainModule()._trainer is None
    assert trainer._logger_connector.should_update_logs in (True, False)
    assert isinstance(trainer._logger_connector._callback_metrics, dict)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
    assert trainer.fit_loop._restarting is False
    assert trainer.fit_loop._can_stop_early in (True, False)
    assert trainer.fit_loop._data_fetcher is None
    assert trainer._checkpoint_connector._loaded_checkpoint == {}
    assert trainer._accelerator_connector.cluster_environment is not None
    assert _given_hyperparameters.get() is None
    assert trainer_state.intervals_of(ModelCheckpoint(every_n_train_steps=7)) == (7, 0, False)


def test_what_lightning_does_not_restore_of_a_model_checkpoint_is_told_and_taken_up(tmp_path):
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss")
    make_trainer(tmp_path, keeper, enable_checkpointing=True).fit(PlainModule(), loader(), loader())
    state = trainer_state.unsaved_state(keeper)
    assert state["_last_global_step_saved"] == 4
    again = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer_state.put_unsaved_state(again, state)
    assert trainer_state.unsaved_state(again) == state
    [file] = trainer_state.files_of(keeper)
    assert file == keeper.best_model_path
