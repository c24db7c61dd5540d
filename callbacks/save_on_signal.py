"""Save a checkpoint and exit after a signal, at the same optimizer step on all ranks."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_diffusion.callbacks.evaluation import refuse_other_run
from lit_diffusion.callbacks.slurm import is_requeue_of, job_id, mark_checkpoints, requeue_job
from lit_diffusion.callbacks.trainer_state import (
    AccumulationTracker,
    disable_signal_handlers,
    enable_signal_handlers,
    ends_epoch,
    is_ending,
    validation_follows,
)
from lit_diffusion.files import is_checkpoint, path_after_replace
from lit_diffusion.signals import TERMINAL_SIGNALS, SavedOnSignal, SignalRecorder, print_error


class SaveOnSignal(AccumulationTracker, Callback):
    """Saves `folder`/last.ckpt at the next safe point after a signal, and ends the process.

    The exit code is 75 after a signal from a batch system, such as SIGTERM or SIGUSR1, and 130
    after Ctrl-C. It is 129 after SIGHUP, which a terminal sends when it closes. Under nohup, SIGHUP
    remains ignored.

    A safe point is the end of a training batch in which the optimizer made a step, or the end of
    the validation that follows such a batch. The last batch of an epoch is not a safe point,
    because a run that is resumed from there would skip the hooks at the end of the epoch. All ranks
    save after the same step, even if only some of them receive the signal. Further signals have no
    effect, except for a second Ctrl-C: it ends the process at once if the checkpoint is not saved
    yet.

    If SLURM preempts the job, or sends the signal requested with `sbatch --signal=SIGUSR1`, rank 0
    asks SLURM to requeue the job. Lightning's own signal handlers are disabled, because they save
    immediately, which may be in the middle of a step.

    Args:
        folder: folder for last.ckpt. None uses checkpoints/ in the Trainer's `default_root_dir`.
        signals: names of the signals after which to save.
        requeue: whether to ask SLURM to requeue the job.

    Raises:
        ValueError: if a signal name is invalid. At the start of a fit, the error is also raised if
            Lightning would resume from a checkpoint of another SLURM job without being asked to, or
            if a new fit would replace the last.ckpt of another fit.

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
        self._default_folder: Path | None = None  # `folder` of the last fit, if none was passed
        self.requeue = requeue
        self._recorder = SignalRecorder([by_name[name] for name in signals])
        self._reducer = _MaxReducer()
        self._signal = 0  # the signal on which all ranks have agreed to save; 0 before that
        self._exit: SavedOnSignal | None = None  # exception to raise after the save

    @property
    def path(self) -> Path:
        """Path of the checkpoint. Raises ValueError before a fit if no folder was passed."""
        if self.folder is None:
            raise ValueError("SaveOnSignal has no folder before a fit; pass one.")
        return self.folder / "last.ckpt"

    def checkpoint_of_requeue(self) -> Path | None:
        """Return the checkpoint to resume from if SLURM has requeued this job, else None."""
        path = path_after_replace(self.path)
        return path if is_requeue_of(path.parent) and is_checkpoint(path) else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start recording signals, and move this callback to the end of the list."""
        if stage == "fit":
            # Lightning iterates over the old list, so a new list is needed. With the base class
            # `Checkpoint`, Lightning would move this callback to the end by itself, but it would
            # not add its default ModelCheckpoint.
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            others = [callback for callback in callbacks if callback is not self]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
            if self.folder == self._default_folder:  # maybe of an earlier Trainer
                self._default_folder = Path(trainer.default_root_dir) / "checkpoints"
                self.folder = self._default_folder
            self._signal, self._exit = 0, None
            self._recorder.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Disable Lightning's signal handlers, and prepare the communication between ranks."""
        resumed = Path(str(trainer.ckpt_path or ""))
        if resumed.name.startswith("hpc_ckpt_") and job_id():
            # Lightning resumes from hpc_ckpt_1.ckpt of any job in the same folder.
            raise ValueError(
                f"{resumed} is of another job, and Lightning would resume from it unasked; to "
                "resume from it, rename it and pass it as ckpt_path, else delete it."
            )
        fix = "resume from it by ckpt_path, move it away, or give SaveOnSignal another folder"
        refuse_other_run(trainer, self.path, self.path.exists(), fix)
        disable_signal_handlers(trainer)
        self._reducer = _MaxReducer(trainer)
        if trainer.is_global_zero:
            message = "\nSaving after this step. Press Ctrl-C again to end without saving.\n"
            self._recorder.ctrl_c_message = message
            mark_checkpoints(self.path.parent)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """End the process if a checkpoint was saved after the last batch.

        The process does not end in the hook that saves, because the other hooks and the logs of the
        saved step must be completed first.
        """
        if self._exit is not None:
            raise self._exit
        super().on_train_batch_start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if the ranks have agreed on a signal and no validation follows this batch."""
        self._signal = self._signal or self._reducer.reduce_async(self._recorder.received or 0)
        if self._signal and not validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if any rank has received a signal, except in the sanity check."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._signal = self._signal or self._reducer.reduce(self._recorder.received or 0)
            if self._signal:
                self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the process if a checkpoint was saved in an epoch of one batch."""
        if self._exit is not None:
            raise self._exit

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the communication with the other ranks."""
        self._reducer.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the previous signal handlers, and enable Lightning's handlers."""
        self._recorder.stop()
        enable_signal_handlers(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers, unless the process ends because a checkpoint was saved."""
        if not isinstance(exception, SavedOnSignal):  # else a signal could change the exit code
            self.teardown(trainer, pl_module, "fit")

    def _save(self, trainer: Trainer) -> None:
        is_unsafe = self.is_accumulating(trainer) or ends_epoch(trainer)
        if self._exit is not None or is_unsafe or is_ending(trainer):
            return  # checkpoints do not have accumulated gradients; a complete run ends by itself
        saved = SavedOnSignal(self._signal, trainer.global_step, self.path)
        self._recorder.ignore()
        trainer.save_checkpoint(self.path, weights_only=False)
        self._exit = saved
        if trainer.is_global_zero:
            message = f"Saved {saved.path} at step {saved.step}, on {saved.signal.name}."
            job = job_id() if self.requeue and saved.signal not in TERMINAL_SIGNALS else None
            if job is not None:
                message += f" {requeue_job(job, saved.signal)}."
            print_error(message)
        # All ranks wait for the requeue, because srun would end the other ranks if one rank ended.
        self._reducer.close()


class _MaxReducer:
    """Computes the maximum of a number over all ranks. All ranks get the same result."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._group: Any = None
        self._pending: Any = None
        if trainer is not None and trainer.world_size > 1:
            # A separate group on the CPU, so that the host does not wait for the GPU.
            self._group = dist.new_group(backend="gloo")

    def reduce_async(self, number: int) -> int:
        """Start to compute the maximum of `number` over ranks. Return the previous call's maximum.

        The maximum over the ranks is computed in the background, so training can go on. The next
        call returns this maximum. If there is only one rank, this call returns `number`.
        """
        if self._group is None:
            return number
        maximum = self._wait()
        reduced = torch.tensor([number])
        work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, reduced)
        return maximum

    def reduce(self, number: int) -> int:
        """Wait for the other ranks, and return the maximum of `number` over ranks.

        If the result of the previous `reduce_async` is still pending, the maximum includes it.
        """
        return max(self.reduce_async(number), self._wait()) if self._group else number

    def close(self) -> None:
        """Wait for the other ranks, and destroy the process group.

        If the process group stays open, torch may abort.
        """
        if self._group is not None:
            self.reduce(0)
            dist.destroy_process_group(self._group)
            self._group = None

    def _wait(self) -> int:
        if self._pending is None:
            return 0
        (work, reduced), self._pending = self._pending, None
        work.wait()
        return int(reduced)
