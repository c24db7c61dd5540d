"""Signals at every place of a run: what is saved, how it ends, and that it goes on bit for bit."""

import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from support.plain_module import PlainModule, loader, make_trainer
from support.resuming import Recipe, assert_goes_on
from support.spawn import spawn

from lit_diffusion import signals
from lit_diffusion.callbacks import SaveOnSignal, save_on_signal
from lit_diffusion.signals import EXIT_SAVED, SavedOnSignal

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


def trainer_with(folder, *callbacks, **options):
    return make_trainer(folder, *callbacks, **{"enable_checkpointing": True, **options})


def save(folder, *callbacks, batches=5, **options):
    """How a run of 3 epochs ends that gets a signal; what `Sends` sends is before the saver."""
    trainer = trainer_with(folder, *callbacks, SaveOnSignal(folder), max_epochs=3, **options)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(PlainModule(), loader(8 * batches), loader(16))
    return ended.value


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        ("on_train_batch_start", signal.SIGTERM),
        ("on_before_backward", signal.SIGUSR1),
        ("on_before_optimizer_step", signal.SIGTERM),
        ("on_train_batch_end", signal.SIGUSR1),
        ("on_validation_batch_start", signal.SIGTERM),
        ("on_validation_end", signal.SIGUSR1),
    ],
)
def test_a_run_saves_after_the_step_in_which_the_signal_comes(tmp_path, hook, number):
    """In batch 4, and after the validation that follows it."""
    events = []
    order = LambdaCallback(
        on_validation_end=lambda trainer, _: events.append(("validated", trainer.global_step)),
        on_save_checkpoint=lambda trainer, *_: events.append(("saved", trainer.global_step)),
    )
    ended = save(tmp_path, Sends(hook, 4, number), order, val_check_interval=2)
    assert (ended.code, ended.signal, ended.step) == (75, number, 4)
    assert saved_at(tmp_path) == 4
    assert events.index(("validated", 4)) < events.index(("saved", 4))


@pytest.mark.parametrize(("batches", "step"), [(5, 6), (1, 2)])
def test_an_epoch_is_ended_before_a_save(tmp_path, batches, step):
    """What callbacks do at its end is not done again; unless every batch ends one."""
    sends = Sends("on_train_batch_start", step - (batches > 1))
    assert save(tmp_path, sends, batches=batches).step == step


def test_after_any_other_end_signals_are_handled_as_before(tmp_path, handlers):
    fails = LambdaCallback(on_train_batch_end=lambda *_: {}["key"])
    for other in ([], [fails]):
        with pytest.raises(KeyError) if other else nullcontext():
            trainer_with(tmp_path, SaveOnSignal(tmp_path), *other).fit(PlainModule(), loader(8))
        assert {number: signal.getsignal(number) for number in HANDLED} == handlers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("on_before_optimizer_step", 3),
        ("on_train_batch_end", 5),
        ("on_validation_batch_start", 6),
    ],
)
def test_what_was_saved_goes_on_bit_for_bit(tmp_path, hook, batch):
    recipe = Recipe(("EMA", "MomentumDecay", "SampleGrid"))
    saver = SaveOnSignal(tmp_path / "died")
    ended = assert_goes_on(tmp_path, recipe, Sends(hook, batch), saver, error=SavedOnSignal)
    assert ended.code == EXIT_SAVED


@pytest.mark.slow
@pytest.mark.parametrize(
    "accumulation",
    [{"trainer": (("accumulate_grad_batches", 2),)}, {"accumulates_itself": True}],
    ids=["by the Trainer", "by the module"],
)
def test_gradients_of_accumulated_batches_are_not_lost(tmp_path, accumulation):
    dying = Sends("on_before_backward", 3), SaveOnSignal(tmp_path / "died")
    assert_goes_on(tmp_path, Recipe(**accumulation), *dying, error=SavedOnSignal)


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_of_a_terminal_save_and_ask_for_no_other_start(tmp_path, monkeypatch, number, code):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(save_on_signal, "requeue_job", None)
    ended = save(tmp_path, Sends("on_train_batch_start", 3, number))
    assert (ended.code, ended.step, saved_at(tmp_path)) == (code, 3, 3)


@pytest.mark.parametrize("requeue", [True, False])
def test_a_slurm_job_is_requeued_where_that_is_asked_for(tmp_path, monkeypatch, capsys, requeue):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(save_on_signal, "requeue_job", lambda job, number: f"{job} {number.name}")
    saver, sends = SaveOnSignal(tmp_path, requeue=requeue), Sends("on_train_batch_start", 2)
    with pytest.raises(SavedOnSignal):
        trainer_with(tmp_path, saver, sends, max_epochs=3).fit(PlainModule(), loader(40))
    assert ("on SIGTERM. 7 SIGTERM." in capsys.readouterr().err) == requeue


@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_before_the_save_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    ended = save(tmp_path, *(Sends("on_train_batch_start", 3, signal.SIGINT) for _ in range(2)))
    assert isinstance(ended.__context__, KeyboardInterrupt)
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_changes_nothing(tmp_path, second):
    sends = Sends("on_train_batch_start", 3), Sends("on_save_checkpoint", 3, second)
    ended = save(tmp_path, *sends)
    assert (ended.signal, ended.step, sends[1].sent) == (signal.SIGTERM, 3, True)


def test_a_run_that_is_complete_ends_as_usual(tmp_path):
    trainer = trainer_with(tmp_path, Sends("on_train_batch_start", 5), SaveOnSignal(tmp_path))
    trainer.fit(PlainModule(), loader(40), loader(16))
    assert trainer.global_step == 5


@pytest.mark.usefixtures("terminal_signals")
def test_lightning_sets_no_handler_that_saves_inside_of_it(tmp_path):
    """Its handlers would broadcast, which deadlocks where ranks are in other places."""
    handlers, saver = [], SaveOnSignal(tmp_path)
    look = LambdaCallback(
        on_train_batch_start=lambda *_: handlers.extend(map(signal.getsignal, HANDLED))
    )
    trainer_with(tmp_path, saver, look).fit(PlainModule(), loader(8))
    assert {handler.__self__ for handler in handlers} == {saver._recorder}


@pytest.mark.parametrize("name", ["SIGKILL", "sigterm"])
def test_names_that_are_no_signals_to_handle_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"SIGTERM or SIGUSR1, got '{name}'"):
        SaveOnSignal(tmp_path, signals=[name])


def test_a_new_job_does_not_go_on_from_what_another_left(tmp_path, monkeypatch):
    """Lightning resumes from hpc_ckpt_1.ckpt of any job in the folder, unasked."""
    make_trainer(tmp_path).fit(module := PlainModule(), loader(8))
    module.trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    for name in ("JOB_ID", "NTASKS", "JOB_NAME", "NODEID", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", {"NTASKS": "1", "JOB_NAME": "train"}.get(name, "0"))
    with pytest.raises(ValueError, match=r"hpc_ckpt_1.ckpt is of another job"):
        trainer_with(tmp_path, SaveOnSignal(tmp_path)).fit(PlainModule(), loader(8))


def test_a_new_run_does_not_replace_what_another_has_saved(tmp_path):
    save(tmp_path, Sends("on_train_batch_start"))
    before = (tmp_path / "last.ckpt").read_bytes()
    with pytest.raises(
        ValueError, match=r"last\.ckpt belongs to another run: resume from it by ckpt_p"
    ):
        trainer_with(tmp_path, SaveOnSignal(tmp_path)).fit(PlainModule(), loader(8))
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_without_a_folder_it_saves_below_that_of_the_run(tmp_path):
    saver, sends = SaveOnSignal(), Sends("on_train_batch_start", 2)
    with pytest.raises(ValueError, match="no folder before a fit; pass one"):
        saver.checkpoint_of_requeue()
    with pytest.raises(SavedOnSignal) as ended:
        trainer_with(tmp_path, saver, sends, max_epochs=3).fit(PlainModule(), loader(40))
    assert ended.value.path == tmp_path / "checkpoints" / "last.ckpt"
    assert ended.value.path.is_file()


def test_without_a_folder_it_saves_below_that_of_the_present_trainer(tmp_path):
    saver = SaveOnSignal()
    for name in ("first", "second"):
        trainer_with(tmp_path / name, saver).fit(PlainModule(), loader(8))
        assert saver.path == tmp_path / name / "checkpoints" / "last.ckpt"
    saver.folder = tmp_path
    trainer_with(tmp_path / "third", saver).fit(PlainModule(), loader(8))
    assert saver.path == tmp_path / "last.ckpt"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_lightning_keeps_the_checkpoint_callback_that_it_has_without_it(tmp_path, checkpointing):
    saver, other = SaveOnSignal(tmp_path), Callback()
    trainer = trainer_with(tmp_path, saver, other, enable_checkpointing=checkpointing)
    trainer.fit(PlainModule(), loader(8))
    expected = [ModelCheckpoint] * checkpointing
    assert [type(saved) for saved in trainer.checkpoint_callbacks] == expected
    assert len(list(tmp_path.rglob("*.ckpt"))) == checkpointing
    assert trainer.callbacks[-1] is saver  # what others do in a batch is in what it saves


class SlowOnRankZero(PlainModule):
    """Rank 1 is sent a SIGUSR1 in its step 3."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            time.sleep(0.1)
        elif self.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def train_until_signalled(folder):
    """(step of the file, exit code) with which a rank ended."""
    options = {"devices": 2, "strategy": "ddp", "enable_checkpointing": True}
    trainer = make_trainer(folder, SaveOnSignal(folder), max_epochs=9, **options)
    with pytest.raises(SavedOnSignal) as end:
        trainer.fit(SlowOnRankZero(), loader(64))
    return end.value.step, end.value.code


@pytest.mark.slow
def test_ranks_save_after_the_same_step_whichever_gets_the_signal(tmp_path):
    """One rank is slow, so that the other waits for it in a collective when the signal comes."""
    ends = spawn(train_until_signalled, 2, tmp_path)
    assert set(ends) == {(saved_at(tmp_path), EXIT_SAVED)}
    assert ends[0][0] >= 4
