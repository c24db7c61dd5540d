"""When one of several ranks fails, dies or hangs, the others end too, and say which it was.

Ranks learn of each other by words that they keep in the store of their process group.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.distributed_c10d import PrefixStore, Store

from lit_diffusion.callbacks.rank_watch.verdict import (
    PATIENCE,
    RankVerdict,
    RankWord,
    SeenRank,
    rank_verdict,
)

BEAT = 0.25  # seconds between signs of life
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
        if trainer.world_size > 1 and dist.is_initialized():
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


class RunWatch(threading.Thread):
    """Beats, finds who has ended the run, and ends this process if its main thread does not.

    Rank 0 reads the words of all and tells its verdict. The others read those of rank 0, and judge
    only whether it is still there: the store may go with it.
    """

    def __init__(self, trainer: Trainer, timeout: float | None) -> None:
        super().__init__(name="rank-watch", daemon=True)
        world: Any = dist.group.WORLD
        self._group_store = world.get_group_store()
        self._store: Store | None = None
        self._timeout = timeout or self._group_store.timeout.total_seconds()
        self._trainer, self._rank, self._main = trainer, dist.get_rank(), threading.get_ident()
        watched = {0, self._rank} if self._rank else range(dist.get_world_size())
        self._seen = {rank: SeenRank() for rank in watched}
        self._is_broken, self._run, self._last = False, 0, RankWord()
        self._now, self._moved, self._end = 0.0, 0.0, ("", "", 0.0)
        self._found: RankVerdict | None = None
        self._has_left, self._is_closing = threading.Event(), threading.Event()
        self._has_met = threading.Event()
        self.start()

    def meet(self) -> None:
        """Wait for the first word of the others: who dies before it can't be told from one late."""
        self._has_met.wait(PATIENCE)

    def leave(self, ended: str, said: str = "") -> RankVerdict | None:
        """End the watch with the word on how the main thread ended; the verdict, if any."""
        self._end = ended, said, self._now
        self._has_left.set()
        self._let_others_know()
        self._is_closing.set()
        self.join(PATIENCE)
        return self._found

    def _let_others_know(self) -> None:
        until = time.monotonic() + 2 * PATIENCE
        while self.is_alive() and time.monotonic() < until and self._is_awaited():
            time.sleep(BEAT / 10)

    def _is_awaited(self) -> bool:
        if self._found is None and self._end[0] == "lost":
            return True
        blamed = {self._found.rank} if self._found else set()
        those = {self._rank} if self._rank else self._seen.keys() - {0} - blamed
        words = [self._seen[rank].word for rank in those]
        know = all(word.verdict or word.ended in ("done", "left", "gone") for word in words)
        return not (know or self._is_broken)

    def run(self) -> None:
        """Beat and judge until closed; a mistake in here is no reason to end a run."""
        try:
            self._watch()
        except Exception as error:
            print(f"rank {self._rank} is watched no more: {error!r}.", file=sys.stderr)
            self._exchange(RankWord(beat=-1, ended="done"))
        finally:
            self._has_met.set()

    def _watch(self) -> None:
        exchange, last = threading.Thread(), time.monotonic()
        while not self._is_closing.wait(BEAT if self._has_met.is_set() else BEAT / 10):
            dead = [rank for rank, seen in self._seen.items() if has_died(seen.word.process)]
            if begins := not exchange.is_alive():
                exchange = threading.Thread(target=self._exchange, args=[self._word()], daemon=True)
                exchange.start()
            exchange.join(BEAT)  # a call to a store whose host stands still does not come back
            # Time in which the whole process stood still, as in a suspended job, does not count.
            self._now, last = self._now + min(time.monotonic() - last, 4 * BEAT), time.monotonic()
            if self._is_broken or (begins and not exchange.is_alive()):
                for rank in dead:  # whose last word, which may tell of an end, was read after
                    word = self._seen[rank].word
                    if not word.ended:
                        self._seen[rank] = SeenRank(self._now, word._replace(ended="gone"))
            if self._found is None and (found := self._judged()):
                self._found = found
                threading.Thread(target=self._act, args=[found], daemon=True).start()

    def _word(self) -> RankWord:
        beat, step, entered = self._last.beat + 1, self._trainer.global_step, collectives()
        self._moved = self._moved if entered == self._last.collectives else self._now
        still, place, (ended, said, since) = self._now - self._moved, where(self._main), self._end
        end = ended, said, self._now - since
        self._last = RankWord(beat, step, entered, still, place, *end, this_process(), self._found)
        return self._last

    def _exchange(self, word: RankWord) -> None:
        try:
            self._connected().set(str(self._rank), json.dumps(word))
            keys = [str(rank) for rank in self._seen]
            for rank, value in zip(self._seen, self._connected().multi_get(keys), strict=True):
                heard = RankWord(*json.loads(value))
                if heard.beat != self._seen[rank].word.beat:
                    self._seen[rank] = SeenRank(self._now, heard)
            self._is_broken = False
            if all(seen.word.beat for seen in self._seen.values()):
                self._has_met.set()
        except Exception:  # the host of the store is gone, or the way to it
            self._store, self._is_broken = None, True

    def _connected(self) -> Store:
        if self._store is None:
            store = self._group_store.clone()  # a connection of its own
            self._run = self._run or store.add(f"rank_watch/{self._rank}", 1)
            store = PrefixStore(f"rank_watch/{self._run}", store)
            for rank in self._seen:
                store.compare_set(str(rank), "", "[]")  # who asks for a missing key waits for it
            self._store = store
        return self._store

    def _judged(self) -> RankVerdict | None:
        heard, word = self._seen[0]
        if self._rank == 0:  # whose time stands still while it does not even hear of itself
            return rank_verdict(self._seen, heard, self._timeout)
        if word.verdict is not None:
            return RankVerdict(*word.verdict)
        if word.ended == "lost":  # and is about to tell whom it has lost
            word = word._replace(ended="")
        limit = PATIENCE if self._is_broken or self._end[0] == "lost" else self._timeout
        ranks = {0: SeenRank(heard, word), self._rank: SeenRank(self._now)}
        return rank_verdict(ranks, self._now, limit)

    def _act(self, verdict: RankVerdict) -> None:
        # Best by the exception that its main thread gets, if it gets one.
        blamed = verdict.rank == self._rank
        if self._has_left.wait(0.0 if blamed else 0.5):
            return
        stack = traceback.format_stack(sys._current_frames()[self._main]) if blamed else []
        print(f"[rank {self._rank}] {verdict.text}\n", *stack, sep="", file=sys.stderr, flush=True)
        if blamed:
            self._let_others_know()
        if not self._has_left.wait(0.0 if blamed else PATIENCE):
            end_process(self._trainer)


def how_it_ended(exception: BaseException) -> str:
    """Whether a rank "left" on purpose, "lost" the others or "failed" by itself."""
    if isinstance(exception, SystemExit | KeyboardInterrupt):
        return "left"
    broken = isinstance(exception, RuntimeError) and _LOST.search(str(exception))
    return "lost" if broken or isinstance(exception, dist.DistError) else "failed"


def in_a_line(exception: BaseException) -> str:
    """Type and message of an exception, its first 300 letters."""
    return " ".join("".join(traceback.format_exception_only(exception)).split())[:300]


def this_process() -> str:
    """Names this process among those of all machines; "" where the system has no such name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


def has_died(process: str) -> bool:
    """Whether a process that was named by `this_process` on this machine is dead."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != this_process().rpartition(" ")[0]:
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def collectives() -> int:
    """How many collectives of the default group this process has entered; 0 if it does not say."""
    with suppress(AttributeError, RuntimeError):  # torch tells it nowhere in public
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return 0


def where(thread: int) -> str:
    """The line that a thread is at, of the innermost code that was not installed."""
    if (frame := sys._current_frames().get(thread)) is None:
        return ""
    lines = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_stack(frame)]
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    own = [line for line in lines if not line[0].startswith(("<", *installed))]
    file, number, name = (own or lines)[0]
    return f"{file}:{number} ({name})"


def end_process(trainer: Trainer) -> None:
    """End this process, whatever its main thread is in, and those that it started."""
    for child in multiprocessing.active_children():  # that load data
        child.kill()
    launcher: Any = trainer.strategy.launcher
    if trainer.is_global_zero and hasattr(launcher, "kill"):
        time.sleep(1.0)  # the other ranks are about to end, but for one that can't
        with suppress(OSError):
            launcher.kill(signal.SIGKILL)
    sys.stdout.flush()
    os._exit(1)
