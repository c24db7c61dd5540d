"""Signals at every place of a run: what is saved, how it ends, and that it goes on bit for bit."""

import os
import signal
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from support.on_ranks import run_on_ranks
from support.plain_module import PlainModule, loader, make_trainer
from support.resuming import CALLBACKS, Death, Recipe, assert_goes_on

from lit_diffusion import signals
from lit_diffusion.callbacks import EMA, SampleGrid, SaveOnSignal, save_on_signal
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.signals import SAVED, SavedOnSignal

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Sends(Callback):
    """Sends this process a signal in a hook, from batch `batch` of the run on, once."""

    def __init__(self, hook, batch=4, number=signal.SIGTERM):
        self.batch, self.number, self.sent = batch, number, False
        setattr(self, hook, self._send)

    def _send(self, trainer, *args):
        if not self.sent and trainer.fit_loop.total_batch_idx + 1 >= self.batch:
            self.sent = True
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def handlers(tmp_path, monkeypatch):
    """After a save signals stay without effect; the tests' process shall mind them again."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def saved_at(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)["global_step"]


PLACES = [
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
]


@pytest.mark.parametrize("number", HANDLED[:2])
@pytest.mark.parametrize("hook", PLACES)
def test_a_run_saves_after_the_step_in_which_the_signal_comes(tmp_path, hook, number):
    """In batch 4, which validation follows."""
    trainer = make_trainer(
        tmp_path,
        SaveOnSignal(tmp_path),
        Sends(hook, 4, number),
        max_epochs=3,
        val_check_interval=2,
        enable_checkpointing=True,
    )
    with pytest.raises(SystemExit) as ended:
        trainer.fit(PlainModule(), loader(40), loader(16))
    assert ended.value.code == SAVED == 75
    assert (ended.value.signal, ended.value.step) == (number, 4)
    assert saved_at(tmp_path) == trainer.global_step == 4


@pytest.mark.parametrize(("batches", "step"), [(5, 6), (1, 5)])
def test_an_epoch_is_ended_before_a_save(tmp_path, batches, step):
    """What callbacks do at its end is not done again; unless every batch ends one."""
    sends = Sends("on_train_batch_start", 5)
    sends.on_train_batch_start = lambda trainer, *args: (
        trainer.global_step == 4 and os.kill(os.getpid(), signal.SIGTERM)
    )
    trainer = make_trainer(
        tmp_path, sends, SaveOnSignal(tmp_path), max_epochs=9, enable_checkpointing=True
    )
    with pytest.raises(SavedOnSignal) as ended:
        trainer.fit(PlainModule(), loader(8 * batches))
    assert ended.value.step == step


def test_after_any_other_end_signals_are_handled_as_before(tmp_path, handlers):
    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise KeyError

    for other in ([], [Fails()]):
        trainer = make_trainer(tmp_path, SaveOnSignal(tmp_path), *other, enable_checkpointing=True)
        with pytest.raises(KeyError) if other else nullcontext():
            trainer.fit(PlainModule(), loader(8))
        assert {number: signal.getsignal(number) for number in HANDLED} == handlers


def test_a_request_to_stop_that_is_not_met_yet_is_no_end(tmp_path):
    class Stops(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    saver, sends = SaveOnSignal(tmp_path), Sends("on_train_batch_start", 3)
    trainer = make_trainer(
        tmp_path, saver, sends, Stops(), max_epochs=9, min_steps=20, enable_checkpointing=True
    )
    with pytest.raises(SavedOnSignal) as ended:
        trainer.fit(PlainModule(), loader(40))
    assert ended.value.step == 3


@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("on_before_optimizer_step", 3),
        pytest.param("on_train_batch_end", 5, marks=pytest.mark.slow),
        pytest.param("on_validation_batch_start", 6, marks=pytest.mark.slow),
        pytest.param("on_save_checkpoint", 5, marks=pytest.mark.slow),
    ],
)
def test_what_was_saved_goes_on_bit_for_bit(tmp_path, hook, batch):
    recipe = Recipe(("EMA", "MomentumDecay", "FIDEvaluation", "SampleGrid"))
    saver = SaveOnSignal(tmp_path / "died")
    ended = assert_goes_on(tmp_path, recipe, Sends(hook, batch), saver, error=SavedOnSignal)
    assert ended.code == SAVED


class SendsWhileSampling(Callback):
    """Sends this process a SIGTERM in the first `generate` from step 3 on."""

    def on_train_start(self, trainer, pl_module):
        generate, self.sent_at = pl_module.generate, None

        def signalled(seeds, labels=None):
            if self.sent_at is None and trainer.global_step >= 3:
                self.sent_at = (trainer.global_step, trainer.validating)
                os.kill(os.getpid(), signal.SIGTERM)
            return generate(seeds, labels)

        pl_module.generate = signalled


VALIDATES = (("val_check_interval", 3),)


@pytest.mark.parametrize(
    ("sampler", "trainer", "sent_at"),
    [
        pytest.param(
            SampleGrid(4, every_n_steps=3), (), (3, False), marks=pytest.mark.slow, id="a grid"
        ),
        pytest.param(SampleGrid(4), VALIDATES, (3, True), id="a grid in a validation"),
        pytest.param(
            SampleGrid(4, every_n_steps=3),
            VALIDATES,
            (3, False),
            marks=pytest.mark.slow,
            id="a grid that a validation follows",
        ),
        pytest.param(None, (), (4, False), marks=pytest.mark.slow, id="an FID"),
    ],
)
def test_a_signal_while_it_samples_goes_on_bit_for_bit(
    tmp_path, monkeypatch, sampler, trainer, sent_at
):
    monkeypatch.setitem(CALLBACKS, "SampleGrid", lambda: deepcopy(sampler))
    kind = "FIDEvaluation" if sampler is None else "SampleGrid"
    sends, saver = SendsWhileSampling(), SaveOnSignal(tmp_path / "died")
    recipe = Recipe(("EMA", kind), trainer=trainer)
    ended = assert_goes_on(tmp_path, recipe, sends, saver, error=SavedOnSignal)
    assert (ended.code, ended.step) == (SAVED, sent_at[0])
    assert sends.sent_at == sent_at


def test_a_validation_that_a_run_dies_in_after_a_signal_is_done_again(tmp_path):
    """Saved before it, the run would go on behind it: its row would be lost."""

    class Dies(Callback):
        def on_validation_batch_start(self, *args):
            raise Death

    died = tmp_path / "died"
    regular = LastCheckpoint(died, first=1, every_n_seconds=3600.0)
    dying = Sends("on_train_batch_start", 3), Dies(), regular, SaveOnSignal(died)
    assert_goes_on(tmp_path, Recipe(trainer=VALIDATES), *dying, error=Death)
    assert dying[0].sent
    assert saved_at(died) == 1


@pytest.mark.parametrize(
    "recipe",
    [Recipe(trainer=(("accumulate_grad_batches", 2),)), Recipe(accumulates_itself=True)],
    ids=["by the Trainer", "by the module"],
)
def test_gradients_of_accumulated_batches_are_not_lost(tmp_path, recipe):
    dying = Sends("on_before_backward", 3), SaveOnSignal(tmp_path / "died")
    assert_goes_on(tmp_path, recipe, *dying, error=SavedOnSignal)


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_of_a_terminal_save_and_ask_for_no_other_start(tmp_path, monkeypatch, number, code):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(save_on_signal, "requeue_job", None)
    sends = Sends("on_train_batch_start", 3, number)
    trainer = make_trainer(
        tmp_path, sends, SaveOnSignal(tmp_path), max_epochs=3, enable_checkpointing=True
    )
    with pytest.raises(SavedOnSignal) as ended:
        trainer.fit(PlainModule(), loader(40))
    assert (ended.value.code, ended.value.step, saved_at(tmp_path)) == (code, 3, 3)


@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_before_the_save_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "ECHO", 0.0)
    sends = (Sends("on_train_batch_start", 3, signal.SIGINT) for _ in range(2))
    trainer = make_trainer(
        tmp_path, *sends, SaveOnSignal(tmp_path), max_epochs=3, enable_checkpointing=True
    )
    with pytest.raises(SystemExit) as ended:
        trainer.fit(PlainModule(), loader(40))
    assert isinstance(ended.value.__context__, KeyboardInterrupt)
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_changes_nothing(tmp_path, second):
    sends = Sends("on_train_batch_start", 3), Sends("on_save_checkpoint", 3, second)
    trainer = make_trainer(
        tmp_path, *sends, SaveOnSignal(tmp_path), max_epochs=3, enable_checkpointing=True
    )
    with pytest.raises(SavedOnSignal) as ended:
        trainer.fit(PlainModule(), loader(40))
    assert (ended.value.signal, ended.value.step) == (signal.SIGTERM, 3)
    assert sends[1].sent


def test_averages_are_never_left_in_the_place_of_the_weights(tmp_path):
    module = PlainModule()
    trainer = make_trainer(
        tmp_path,
        EMA((0.5,)),
        Sends("on_validation_batch_start"),
        SaveOnSignal(tmp_path),
        max_epochs=3,
        val_check_interval=2,
        enable_checkpointing=True,
    )
    with pytest.raises(SavedOnSignal):
        trainer.fit(module, loader(40), loader(16))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())


def test_a_run_that_is_complete_ends_as_usual(tmp_path):
    trainer = make_trainer(
        tmp_path,
        Sends("on_train_batch_start", 5),
        SaveOnSignal(tmp_path),
        enable_checkpointing=True,
    )
    trainer.fit(PlainModule(), loader(40), loader(16))
    assert trainer.global_step == 5


@pytest.mark.usefixtures("terminal_signals")
def test_lightning_sets_no_handler_that_saves_inside_of_it(tmp_path, monkeypatch):
    """Its handlers would broadcast, which deadlocks where ranks are in other places."""
    found = []

    class Look(Callback):
        def on_train_batch_start(self, *args):
            found.extend(signal.getsignal(number) for number in HANDLED)

    saver = SaveOnSignal(tmp_path)
    make_trainer(tmp_path, saver, Look(), enable_checkpointing=True).fit(PlainModule(), loader(8))
    assert {handler.__self__ for handler in found} == {saver._notes}


@pytest.mark.parametrize("name", ["SIGKILL", "TERM", "sigterm"])
def test_names_that_are_no_signals_to_handle_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"SIGTERM or SIGUSR1, got '{name}'"):
        SaveOnSignal(tmp_path, signals=[name])


@pytest.mark.parametrize("restarts", ["", "1"])
def test_a_new_job_does_not_go_on_from_what_another_left(tmp_path, monkeypatch, restarts):
    """Lightning resumes from hpc_ckpt_1.ckpt of any job in the folder, unasked."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    make_trainer(tmp_path).fit(module := PlainModule(), loader(8))
    module.trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    for name in ("JOB_ID", "NTASKS", "JOB_NAME", "NODEID", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", {"NTASKS": "1", "JOB_NAME": "train"}.get(name, "0"))
    trainer = make_trainer(tmp_path, SaveOnSignal(tmp_path), enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"hpc_ckpt_1.ckpt was left by another job"):
        trainer.fit(PlainModule(), loader(8))


def test_without_a_folder_it_saves_below_that_of_the_run(tmp_path):
    saver = SaveOnSignal()
    with pytest.raises(ValueError, match="no folder before a fit; pass one"):
        saver.checkpoint_of_requeue()
    sends = Sends("on_train_batch_start", 2)
    trainer = make_trainer(tmp_path, saver, sends, max_epochs=3, enable_checkpointing=True)
    with pytest.raises(SavedOnSignal) as ended:
        trainer.fit(PlainModule(), loader(40))
    assert ended.value.path == tmp_path / "checkpoints" / "last.ckpt"
    assert ended.value.path.is_file()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_lightning_keeps_the_checkpoint_callback_that_it_has_without_it(tmp_path, checkpointing):
    saver, other = SaveOnSignal(tmp_path), Callback()
    trainer = make_trainer(tmp_path, saver, other, enable_checkpointing=checkpointing)
    trainer.fit(PlainModule(), loader(8))
    assert [type(saved) for saved in trainer.checkpoint_callbacks] == [ModelCheckpoint][
        :checkpointing
    ]
    assert len(list(tmp_path.rglob("*.ckpt"))) == checkpointing
    assert trainer.callbacks[-1] is saver  # what others do in a batch is in what it saves


def test_only_a_requeue_of_the_very_job_goes_on_by_itself(tmp_path, monkeypatch):
    saver = SaveOnSignal(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    trainer = make_trainer(
        tmp_path, Sends("on_train_batch_start"), saver, max_epochs=3, enable_checkpointing=True
    )
    with pytest.raises(SavedOnSignal):
        trainer.fit(PlainModule(), loader(40))
    assert saver.checkpoint_of_requeue() is None  # another job in the same folder
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert saver.checkpoint_of_requeue() == tmp_path / "last.ckpt"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert saver.checkpoint_of_requeue() is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_save_after_the_same_step_whichever_gets_the_signal(tmp_path, ranks):
    """One rank is slow, so that the others wait for it in a collective when the signal comes."""
    found = run_on_ranks("signal_on_ranks.py", tmp_path, ranks=ranks)
    assert len({rank["step"] for rank in found}) == 1
    assert {rank["code"] for rank in found} == {SAVED}
    assert found[0]["step"] == saved_at(tmp_path) >= 4
