"""When one of several ranks fails, dies or hangs, the others end too, and say which it was."""

import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lit_diffusion.callbacks.rank_link import BEAT, Hub, Member, Progress
from lit_diffusion.callbacks.rank_verdict import PATIENCE, Verdict, unanswered

GRACE = 5.0
"""Seconds that a main thread has to end by itself once another rank has ended the run."""

CONNECTING = timedelta(seconds=10)
"""For a second connection to a store that has just answered."""

SHORTEST = 3 * BEAT
"""Least timeout, in seconds."""

FAILED = 1
"""Exit code of a process that is ended here: the run has failed."""

_LOST = re.compile(r"gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)


class RankWatch(Callback):
    """Ends all ranks with a message that names the one that failed, died or hangs.

    Without it the others wait in a collective for half an hour, or end with gloo's "Connection
    closed by peer". With it each of them tells on stderr what happened to which rank:

    * one raises: `rank 1 failed at step 17: ValueError: ...; see its output.`
    * one is killed or crashes: `rank 2 ended without a word at step 17: ...`
    * one says nothing: `rank 2 was last heard of at step 17, 34 s ago: ...`
    * one stays away from a collective that others are in: `rank 1 has kept the others waiting for
      60 s at step 17, in data.py:33 (read); ...`

    Failures and deaths are known at once, in every phase from `setup` on. The exception that they
    cause in a main thread gets the message as a note. A main thread that is still there five
    seconds later sits in a collective that nobody will complete, where no exception reaches it:
    its process ends with exit code 1. So does that of a rank that hangs, after telling where.

    A rank that works alone for long, in an FID say, is not taken for dead: a thread beats once a
    second. It is the wait of others for it that `timeout` bounds. `SystemExit` and
    `KeyboardInterrupt` end a run on purpose and are no failures; only ranks that are left behind
    tell of them.

    Rank 0 listens on a port of its own. All ranks need the callback, best as the first in their
    list. On a single rank it does nothing.

    Args:
        timeout: seconds that a rank may be silent or waited for, >= 3; None is the timeout of the
            strategy's collectives, 1800 s unless it was given another.

    Raises:
        ValueError: for a shorter time.

    Attributes:
        verdict: what another rank did that ended this one; None otherwise.

    Example:
        >>> trainer = Trainer(callbacks=[RankWatch(timeout=300)], accelerator="cpu", logger=False)
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout >= SHORTEST:
            raise ValueError(
                f"timeout must be at least {SHORTEST:g} seconds, got {timeout}: ranks give a sign "
                f"of life every {BEAT:g} s."
            )
        self.timeout = timeout
        self.verdict: str | None = None
        self._watch: Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to watch, before anything of the run can fail."""
        self.verdict = None
        if _has_ranks(trainer):
            self._watch = Watch(trainer, self.timeout or _timeout_of(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave, since this rank is done."""
        if self._watch is not None:
            self._watch.leave("done")
            self._watch = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell the others, or learn from them what this exception came of."""
        if not _has_ranks(trainer):
            return
        kind, said = how_it_ended(exception), in_a_line(exception)
        try:
            watch = self._watch or Watch(trainer, self.timeout or _timeout_of(trainer))
            found = watch.leave(kind, said)
        except RuntimeError:  # of the store
            found = Verdict(0, unanswered(0))
        self._watch = None
        if found is not None and kind == "lost":
            self.verdict = found.text
            exception.add_note(found.text)


class Watch:
    """A rank's watch over one run.

    Args:
        trainer: of the run.
        timeout: seconds that a rank may be silent or waited for.
    """

    def __init__(self, trainer: Trainer, timeout: float) -> None:
        self._trainer = trainer
        self._rank, self._main = dist.get_rank(), threading.get_ident()
        self._main_is_out = threading.Event()
        store = _store_of_this_run()
        self._hub = Hub(dist.get_world_size(), timeout, store.clone()) if self._rank == 0 else None
        self._member = Member(self._rank, timeout, store, self._progress, self._heard, tell)
        for thread in (self._hub, self._member):
            if thread is not None:
                thread.start()

    def leave(self, kind: str, said: str = "") -> Verdict | None:
        """End the watch, since the main thread leaves the run; the verdict on others, if any.

        Args:
            kind: "done", "left" on purpose, "failed" by itself, "lost" the others.
            said: of an exception.
        """
        self._main_is_out.set()
        self._member.tell(kind, said)
        found = None
        if kind in ("failed", "lost") or self._hub is not None:  # until the others know
            found = self._member.wait(PATIENCE + 2)
        until = time.monotonic() + PATIENCE
        while self._hub is not None and self._hub.expects_more() and time.monotonic() < until:
            time.sleep(0.05)  # the hub ends with this process
        self._member.finish()
        return found

    def _progress(self) -> Progress:
        return Progress(self._trainer.global_step, collectives(), where(self._main))

    def _heard(self, verdict: Verdict) -> None:
        """Have this process end, in the member's thread."""
        if verdict.rank == self._rank:
            if not self._main_is_out.is_set():
                tell(f"[rank {self._rank}] {verdict.text}\n{stack(self._main)}")
                end_process(self._trainer)
        elif not self._main_is_out.wait(0.5):  # else the exception tells
            tell(f"[rank {self._rank}] {verdict.text}")
            if not self._main_is_out.wait(GRACE):
                end_process(self._trainer)


def how_it_ended(exception: BaseException) -> str:
    """Whether a rank "left" on purpose, "lost" the others in a collective, or "failed" by itself.

    Example:
        >>> how_it_ended(SystemExit(75)), how_it_ended(ValueError("no such label"))
        ('left', 'failed')
        >>> how_it_ended(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
        'lost'
    """
    if isinstance(exception, SystemExit | KeyboardInterrupt):
        return "left"
    broken = isinstance(exception, RuntimeError) and _LOST.search(str(exception))
    return "lost" if broken or isinstance(exception, dist.DistError) else "failed"


def in_a_line(exception: BaseException) -> str:
    """Type and message of an exception, its first 300 letters.

    Example:
        >>> in_a_line(SystemExit(75)), in_a_line(KeyboardInterrupt())
        ('SystemExit: 75', 'KeyboardInterrupt')
    """
    text = " ".join(str(exception).split())
    name = type(exception).__name__
    return (f"{name}: {text}" if text else name)[:300]


def collectives() -> int:
    """How many collectives of the default group this process has entered; 0 if it does not say."""
    group = dist.group.WORLD
    try:
        return 0 if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def where(thread: int) -> str:
    """The line that a thread is at, of the innermost code that was not installed.

    Example:
        >>> where(0)
        ''
    """
    if (frame := sys._current_frames().get(thread)) is None:
        return ""
    lines = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_stack(frame)]
    own = [line for line in lines if not line[0].startswith(_INSTALLED)]
    file, number, name = (own or lines)[0]
    return f"{file}:{number} ({name})"


_INSTALLED = ("<", *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))


def stack(thread: int) -> str:
    """What a traceback would say of where a thread is."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def tell(text: str) -> None:
    """Print, unless output is stuck too."""
    _within(1.0, lambda: print(text, file=sys.stderr, flush=True))


def _within(seconds: float, action: Callable[[], Any]) -> None:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def end_process(trainer: Trainer) -> None:
    """End this process, whatever its main thread is in, and those that it started."""
    _within(1.0, sys.stdout.flush)
    for child in multiprocessing.active_children():  # that load data
        child.kill()
    launcher = trainer.strategy.launcher
    if trainer.is_global_zero and launcher is not None and hasattr(launcher, "kill"):
        time.sleep(1.0)  # the other ranks are about to end, but for one that can't
        with suppress(OSError):
            launcher.kill(signal.SIGKILL)
    os._exit(FAILED)


def _has_ranks(trainer: Trainer) -> bool:
    return trainer.world_size > 1 and dist.is_available() and dist.is_initialized()


def _timeout_of(trainer: Trainer) -> float:
    seconds: float = getattr(trainer.strategy, "_timeout", default_pg_timeout).total_seconds()
    return seconds


def _store_of_this_run() -> Any:
    """A connection of its own to the process group's store, in which runs are counted.

    Its own, since a main thread that waits in a store lets nobody else speak. Making it would be
    tried for as long as collectives are if rank 0, which hosts the store, has just died.
    """
    store = _get_default_store()
    run = store.add(f"rank_watch/{dist.get_rank()}", 1)
    usual = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(CONNECTING)
    try:
        return PrefixStore(f"rank_watch/{run}", store.clone())
    finally:
        store.set_timeout(usual)
