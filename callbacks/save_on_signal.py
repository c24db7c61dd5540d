"""A checkpoint at the next safe point after a signal, the same on all ranks."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_diffusion.callbacks.trainer_state import (
    AccumulationTracker,
    disable_signal_handlers,
    enable_signal_handlers,
    ends_epoch,
    is_ending,
    validation_follows,
)
from lit_diffusion.cli.slurm import is_requeue_of, job_id, leave_note, requeue_job
from lit_diffusion.signals import BY_HAND, SavedOnSignal, SignalNotes, print_error


class SaveOnSignal(AccumulationTracker, Callback):
    """Saves `folder`/last.ckpt at the next safe point after a signal, and ends.

    With exit code 75 after a signal of a batch system, 130 after Ctrl-C, and 129 after SIGHUP, by
    which a terminal says that it is gone; nohup's ignoring that one is respected.

    Safe points are the ends of training batches that stepped the optimizer, and of the validation
    that belongs to one; not the last of an epoch, as what callbacks do then is not done again. All
    ranks save after the same step, whichever get the signal. Another changes nothing, but for a
    second Ctrl-C before the save, which ends at once.

    In a SLURM job that is preempted, or signalled by `sbatch --signal=SIGUSR1`, the first rank asks
    for a requeue. Lightning's own handlers, which save inside of the handler, are not set.

    Args:
        folder: for last.ckpt; None is checkpoints/ in the Trainer's `default_root_dir`.
        signals: names of those that are taken for an announcement.
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
        self.folder = None if folder is None else Path(folder)
        self.requeue = requeue
        self._notes = SignalNotes(_numbers(signals))
        self._agreed = _Agreement()
        self._due = 0
        self._saved: SavedOnSignal | None = None

    @property
    def path(self) -> Path:
        """Where it saves; not known before a fit, where no folder was given."""
        if self.folder is None:
            raise ValueError("SaveOnSignal has no folder before a fit; pass one.")
        return self.folder / "last.ckpt"

    def checkpoint_of_requeue(self) -> Path | None:
        """The checkpoint to go on from, in a later start of the SLURM job that saved it."""
        requeued = is_requeue_of(self.path.parent) and self.path.is_file()
        return self.path if requeued else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note signals from here on, and save after all that others do at the end of a batch."""
        if stage == "fit":
            # Another list, as Lightning goes through this one. No `Checkpoint`, which Lightning has
            # last by itself: beside one it would leave out the ModelCheckpoint that it adds.
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            others = [callback for callback in callbacks if callback is not self]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
            self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"
            self._due, self._saved = 0, None
            self._notes.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep Lightning from setting handlers, and prepare to agree with the other ranks."""
        _refuse_stale(trainer)
        disable_signal_handlers(trainer)
        self._agreed = _Agreement(trainer)
        if trainer.is_global_zero:
            self._notes.answer = "\nSaves after this step; Ctrl-C again ends without.\n"
            leave_note(self.path.parent)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """End what was saved: everything of the step before is done and logged."""
        self._end()
        super().on_train_batch_start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if the ranks have agreed to and no validation follows."""
        self._due = self._due or self._agreed.later(self._notes.received or 0)
        if self._due and not validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if any rank has had a signal."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._due = self._due or self._agreed.now(self._notes.received or 0)
            if self._due:
                self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End what was saved after the last batch of an epoch."""
        self._end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave nothing running."""
        self._agreed.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave signals to others."""
        self._notes.stop()
        enable_signal_handlers(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Likewise; after a save further signals must not change how the process ends."""
        if not isinstance(exception, SavedOnSignal):
            self.teardown(trainer, pl_module, "fit")

    def _save(self, trainer: Trainer) -> None:
        waits = self.is_accumulating(trainer) or ends_epoch(trainer)
        if self._saved is not None or waits or is_ending(trainer):
            return  # gradients are not saved, and a complete run ends as usual
        saved = SavedOnSignal(self._due, trainer.global_step, self.path)
        self._notes.ignore()
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved = saved
        if trainer.is_global_zero:
            said = f"Saved {saved.path} at step {saved.step}, on {saved.signal.name}."
            job = job_id() if self.requeue and saved.signal not in BY_HAND else None
            if job is not None:
                said += f" {requeue_job(job, saved.signal)}."
            print_error(said)
        self._agreed.end()  # a rank that ended would have srun end the others before the requeue

    def _end(self) -> None:
        if self._saved is not None:
            raise self._saved


class _Agreement:
    """The largest of the ranks' numbers, told to all of them at the same call."""

    def __init__(self, trainer: Trainer | None = None) -> None:
        self._group: Any = None
        self._running: Any = None
        if trainer is not None and trainer.world_size > 1:
            # Beside the group of the gradients, and on the CPU: no device waits for a signal.
            self._group = dist.new_group(backend="gloo")

    def later(self, number: int) -> int:
        """The numbers that were told at the call before; this one is told meanwhile."""
        if self._group is None:
            return number
        agreed = self._wait()
        told = torch.tensor([number])
        work = dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._running = (work, told)
        return agreed

    def now(self, number: int) -> int:
        """The numbers told at this call and the one before; waits for the other ranks."""
        return max(self.later(number), self._wait()) if self._group else number

    def end(self) -> None:
        """Wait for the other ranks, and let go of the group: torch may abort if it is left."""
        if self._group is not None:
            self.now(0)
            dist.destroy_process_group(self._group)
            self._group = None

    def _wait(self) -> int:
        if self._running is None:
            return 0
        (work, told), self._running = self._running, None
        work.wait()
        return int(told)


def _numbers(names: Sequence[str]) -> list[signal.Signals]:
    known = signal.Signals.__members__
    for name in names:
        if name not in known or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"signals must be names such as SIGTERM or SIGUSR1, got {name!r}.")
    return [known[name] for name in names]


def _refuse_stale(trainer: Trainer) -> None:
    # Lightning resumes unasked from hpc_ckpt_1.ckpt of any job in the same folder.
    path = Path(str(trainer.ckpt_path or ""))
    if path.name.startswith("hpc_ckpt_") and job_id():
        raise ValueError(
            f"{path} was left by another job and would be resumed from unasked; to go on from it, "
            "rename it and pass it as ckpt_path, else delete it."
        )
