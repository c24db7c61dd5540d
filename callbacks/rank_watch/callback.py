"""When one of several ranks fails, dies or hangs, the others end too, and say which it was."""

import re
import sys
from traceback import format_exception_only

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_diffusion.callbacks.rank_watch.watch import RunWatch

_LOST = re.compile(r"gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)


class RankWatch(Callback):
    """Ends all ranks with a message that names the one that failed, died or hangs.

    Each of the others tells on stderr what happened to which rank, as "rank 1 has kept the others
    waiting for 60 s at step 17, in data.py:33 (read)". The exception that this causes in a main
    thread gets the message as a note; where none comes in five seconds, or the rank hangs, the
    process ends with exit code 1. A death on another machine than rank 0's is known when it breaks
    a collective. A rank that works alone for long is not taken for dead: a thread beats.
    `SystemExit` and `KeyboardInterrupt` are no failures; only ranks left behind tell of them.

    All ranks need the callback, best as the first in their list.

    Args:
        timeout: seconds that a rank may be silent or waited for, >= 3; None is the timeout of the
            strategy's collectives, 1800 s unless it was given another.

    Attributes:
        verdict: what another rank did that ended this one; None otherwise.

    Example:
        >>> trainer = Trainer(callbacks=[RankWatch(timeout=300)], accelerator="cpu", logger=False)
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout >= 3.0:
            raise ValueError(f"timeout must be at least 3 seconds, got {timeout}.")
        self.timeout = timeout
        self.verdict: str | None = None
        self._watch: RunWatch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch, before anything of the run can fail."""
        self.verdict = None
        if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            try:
                self._watch = RunWatch(trainer, self.timeout)
                self._watch.meet()
            except Exception as error:  # no reason to end a run, or to hide what ended it
                print(f"this rank is not watched: {error!r}.", file=sys.stderr)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave, since this rank is done."""
        if self._watch is not None:
            self._watch.leave("done")
            self._watch = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell the others, or learn from them what this exception came of."""
        if self._watch is None:  # raised before `setup`
            self.setup(trainer, pl_module, "")
        watch, self._watch = self._watch, None
        ended = how_it_ended(exception)
        found = watch.leave(ended, in_a_line(exception)) if watch is not None else None
        if found is not None and ended == "lost":
            self.verdict = found.text
            exception.add_note(found.text)


def how_it_ended(exception: BaseException) -> str:
    """Whether a rank "left" on purpose, "lost" the others or "failed" by itself."""
    if isinstance(exception, SystemExit | KeyboardInterrupt):
        return "left"
    broken = isinstance(exception, RuntimeError) and _LOST.search(str(exception))
    return "lost" if broken or isinstance(exception, dist.DistError) else "failed"


def in_a_line(exception: BaseException) -> str:
    """Type and message of an exception, its first 300 letters."""
    return " ".join("".join(format_exception_only(exception)).split())[:300]
