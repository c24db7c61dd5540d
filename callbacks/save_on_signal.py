"""A checkpoint at the next safe point after a signal, at the same step on all ranks."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_diffusion.callbacks.slurm import is_requeue_of, job_id, mark_checkpoints, requeue_job
from lit_diffusion.callbacks.trainer_state import (
    AccumulationTracker,
    disable_signal_handlers,
    enable_signal_handlers,
    ends_epoch,
    is_ending,
    validation_follows,
)
from lit_diffusion.signals import TERMINAL_SIGNALS, SavedOnSignal, SignalRecorder, print_error


class SaveOnSignal(AccumulationTracker, Callback):
    """Saves `folder`/last.ckpt at the next safe point after a signal, and ends the process.

    The exit code is 75 after a signal of a batch system, 130 after Ctrl-C, and 129 after SIGHUP,
    which a terminal sends when it closes; if nohup ignores that one, so does this.

    Safe points are the end of a training batch that stepped the optimizer, and the end of the
    validation that follows it; but not the last batch of an epoch, since what callbacks do at the
    end of an epoch is not repeated on resume. All ranks save after the same step, whichever of them
    receive the signal. Further signals change nothing, except a second Ctrl-C before the save,
    which ends the process at once.

    In a SLURM job that is preempted, or signalled by `sbatch --signal=SIGUSR1`, rank 0 asks SLURM
    to requeue the job. Lightning's own handlers, which save inside of the handler, are disabled.

    Args:
        folder: for last.ckpt; None is checkpoints/ in the Trainer's `default_root_dir`.
        signals: names of the signals to save on.
        requeue: whether to requeue a SLURM job.

    Raises:
        ValueError: for unknown signals; and at the start of a fit where Lightning has silently
            picked a checkpoint that another job left behind.

    Example:
        >>> saver = SaveOnSignal("checkpoints")
        >>> trainer = Trainer(callbacks=[saver], logger=False, accelerator="cpu")
        >>> saver.checkpoint_of_requeue() is None  # for trainer.fit(module, ckpt_path=...)
        True
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"),
        requeue: bool = True,
    ) -> None:
        by_name = signal.Signals.__members__
        for name in signals:
            if name not in by_name or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(f"signals must be names such as SIGTERM or SIGUSR1, got {name!r}.")
        self.folder = None if folder is None else Path(folder)
        self.requeue = requeue
        self._recorder = SignalRecorder([by_name[name] for name in signals])
        self._agreement = _Agreement()
        self._signal = 0  # on which the ranks have agreed to save
        self._exit: SavedOnSignal | None = None  # after the save

    @property
    def path(self) -> Path:
        """The file that it saves; unknown before a fit if no folder was passed."""
        if self.folder is None:
            raise ValueError("SaveOnSignal has no folder before a fit; pass one.")
        return self.folder / "last.ckpt"

    def checkpoint_of_requeue(self) -> Path | None:
        """The checkpoint to resume from if this is a requeue of the SLURM job that saved it."""
        requeued = is_requeue_of(self.path.parent) and self.path.is_file()
        return self.path if requeued else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record signals from here on; run after all other callbacks at the end of a batch."""
        if stage == "fit":
            # A new list, as Lightning iterates over this one. Deriving from `Checkpoint`, which
            # Lightning puts last, would make it leave out the ModelCheckpoint that it adds.
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            others = [callback for callback in callbacks if callback is not self]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
            self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"
            self._signal, self._exit = 0, None
            self._recorder.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Disable Lightning's handlers, and prepare to agree with the other ranks."""
        resumed = Path(str(trainer.ckpt_path or ""))
        if resumed.name.startswith("hpc_ckpt_") and job_id():
            # Lightning resumes unasked from hpc_ckpt_1.ckpt of any job in the same folder.
            raise ValueError(
                f"{resumed} was left by another job and would be resumed from unasked; to go on "
                "from it, rename it and pass it as ckpt_path, else delete it."
            )
        disable_signal_handlers(trainer)
        self._agreement = _Agreement(trainer)
        if trainer.is_global_zero:
            message = "\nSaves after this step; Ctrl-C again ends without.\n"
            self._recorder.ctrl_c_message = message
            mark_checkpoints(self.path.parent)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """End the process if it has saved: all of the step before is done and logged by now."""
        if self._exit is not None:
            raise self._exit
        super().on_train_batch_start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if the ranks have agreed to and no validation follows."""
        self._signal = self._signal or self._agreement.later(self._recorder.received or 0)
        if self._signal and not validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if any rank has received a signal."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._signal = self._signal or self._agreement.now(self._recorder.received or 0)
            if self._signal:
                self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the process if it has saved after the only batch of an epoch."""
        if self._exit is not None:
            raise self._exit

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the communication with the other ranks."""
        self._agreement.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the previous signal handlers, and Lightning's."""
        self._recorder.stop()
        enable_signal_handlers(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Likewise; but after a save further signals must not change how the process ends."""
        if not isinstance(exception, SavedOnSignal):
            self.teardown(trainer, pl_module, "fit")

    def _save(self, trainer: Trainer) -> None:
        waits = self.is_accumulating(trainer) or ends_epoch(trainer)
        if self._exit is not None or waits or is_ending(trainer):
            return  # gradients are not in a checkpoint, and a complete run ends as usual
        ended = SavedOnSignal(self._signal, trainer.global_step, self.path)
        self._recorder.ignore()
        trainer.save_checkpoint(self.path, weights_only=False)
        self._exit = ended
        if trainer.is_global_zero:
            message = f"Saved {ended.path} at step {ended.step}, on {ended.signal.name}."
            job = job_id() if self.requeue and ended.signal not in TERMINAL_SIGNALS else None
            if job is not None:
                message += f" {requeue_job(job, ended.signal)}."
            print_error(message)
        # Ranks wait for the requeue: one that ended before it would have srun end the others.
        self._agreement.end()


class _Agreement:
    """The maximum of the ranks' numbers, which all ranks learn at the same call."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._group: Any = None
        self._running: Any = None
        if trainer is not None and trainer.world_size > 1:
            # Beside the group of the gradients, and on the CPU: no device waits for a signal.
            self._group = dist.new_group(backend="gloo")

    def later(self, number: int) -> int:
        """Maximum of the numbers passed at the previous call; starts to reduce those of this one.

        Alone, a rank gets its number at once.
        """
        if self._group is None:
            return number
        maximum = self._wait()
        reduced = torch.tensor([number])
        work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._running = (work, reduced)
        return maximum

    def now(self, number: int) -> int:
        """Maximum of the numbers of this call and the previous one; waits for the other ranks."""
        return max(self.later(number), self._wait()) if self._group else number

    def end(self) -> None:
        """Wait for the other ranks and destroy the group: torch may abort if it is left."""
        if self._group is not None:
            self.now(0)
            dist.destroy_process_group(self._group)
            self._group = None

    def _wait(self) -> int:
        if self._running is None:
            return 0
        (work, reduced), self._running = self._running, None
        work.wait()
        return int(reduced)
