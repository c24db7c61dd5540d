"""End all ranks if one rank fails, is killed or hangs, and print which rank it was.

A thread of each rank writes heartbeats into the key-value store of the process group. Rank 0 reads
the heartbeats of all ranks. If a rank has failed, the heartbeat of rank 0 contains a message that
names the failed rank. All ranks read the heartbeat of rank 0.
"""

import json
import math
import multiprocessing
import os
import re
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.distributed_c10d import PrefixStore, Store

INTERVAL = 0.25  # seconds between heartbeats
PATIENCE = 5.0  # seconds to wait for reports from other ranks, and for the main thread to end
_CONNECTION = re.compile(r"^Dist|gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)
_INSTALLED = ("<", *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))


class RankWatch(Callback):
    """Ends all ranks if one rank fails, is killed or hangs, and prints which rank it was.

    The ranks that have not failed print a message and exit with code 1. For example, the message
    may be "rank 1 has kept the others waiting for 60 s at step 17, in data.py:33 (read)". All ranks
    need this callback. List it before all other callbacks.

    Args:
        timeout: time in seconds, >= 3. A rank counts as failed if it sends no heartbeats for this
            time, or if it keeps other ranks waiting in a collective for this time. None uses the
            timeout of the strategy's collectives, which is 1800 s by default.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RankWatch(timeout=60)], accelerator="cpu", logger=False)
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout >= 3.0:
            raise ValueError(f"timeout must be at least 3 seconds, got {timeout}.")
        self.timeout = timeout
        self.verdict: str | None = None  # the message, if a collective of this rank has failed
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching, before anything in the run can fail."""
        if trainer.world_size > 1 and dist.is_initialized():
            self._watch = _Watch(trainer, self.timeout)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, because this rank is done."""
        if self._watch is not None:
            self._watch.leave("ended")
            self._watch = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Report the exception to the other ranks, or find the rank that has caused it."""
        if self._watch is None:  # raised before `setup`
            self.setup(trainer, pl_module, "")
        if self._watch is None:
            return
        broken = isinstance(exception, RuntimeError) and _CONNECTION.search(repr(exception))
        failure = ""
        if not broken and not isinstance(exception, SystemExit | KeyboardInterrupt):
            text = " ".join(f"{type(exception).__name__}: {exception}".split())[:300]
            failure = f"failed at step {trainer.global_step}: {text}; see its output."
        message, self._watch = self._watch.leave("lost" if broken else "ended", failure), None
        self.verdict = message if broken and message else None
        if self.verdict:
            exception.add_note(self.verdict)


@dataclass
class Heartbeat:
    """State of a rank, which it writes into the store several times a second."""

    beats: int = 0  # number of heartbeats; 0 before the first
    collectives: int = 0  # collectives entered; other ranks wait for the rank with the fewest
    place: str = "at step 0"  # the step, and the position of the main thread in the code
    process: str = ""  # machine and process id
    state: str = "running"  # or "lost" (a collective has failed), or "ended"
    message: str = ""  # message that names the failed rank; "" if no rank has failed
    heard: float = 0.0  # time at which the reader received it; -inf once its process has ended
    since: float = 0.0  # time at which the reader saw `collectives` or `state` change


def find_culprit(ranks: dict[int, Heartbeat], now: float, timeout: float) -> str:
    """Return a message that names the rank that ended or blocked the run; "" if no rank did.

    If there is a rank without recent heartbeats, the function names this rank. Otherwise, it names
    a rank that keeps other ranks waiting in a collective. If there are several such ranks, it names
    the one that has entered the fewest collectives. `timeout` is that of `RankWatch`. `now` is the
    time in seconds on the clock of `Heartbeat.heard`.
    """
    running = [beat for beat in ranks.values() if beat.state != "ended"]
    broken = any(beat.state == "lost" and now - beat.since > PATIENCE for beat in running)
    limit, causes = PATIENCE if broken else timeout, []
    for rank, beat in ranks.items():
        if beat.message:
            return beat.message
        ahead = [other.since for other in running if other.collectives > beat.collectives]
        waited = now - max(beat.since, min(ahead, default=now))
        text = f"has kept the others waiting for {waited:.0f} s {beat.place}"
        if is_silent := now - beat.heard > limit:
            text = f"was last heard of {beat.place}: killed, out of memory or stopped"
        if beat.state == "running" and (is_silent or waited > limit):
            causes.append((not is_silent, beat.collectives, rank, text))
    return "rank {2} {3}; see its output.".format(*min(causes)) if causes else ""


class _Watch(threading.Thread):
    """Exchanges heartbeats, and ends this process if a rank has failed."""

    def __init__(self, trainer: Trainer, timeout: float | None) -> None:
        super().__init__(daemon=True)  # because the thread may hang in the store
        self._group = cast(Any, dist.group.WORLD)
        self._timeout = timeout or self._group.get_group_store().timeout.total_seconds()
        self._trainer, self._rank = trainer, dist.get_rank()
        self._main_thread, self._has_left = threading.get_ident(), threading.Event()
        self._state, self._failure = "running", ""
        self._ranks = {r: Heartbeat() for r in range(1 if self._rank else dist.get_world_size())}
        self._beat, self._now = Heartbeat(process=_live_process(os.getpid())), 0.0
        self.start()

    def leave(self, state: str, failure: str = "") -> str:
        """Report to the other ranks how the main thread ended; return the message, or ""."""
        self._failure = failure and f"rank {self._rank} {failure}"  # set before the state
        start, self._state = self._now, state
        self._has_left.set()
        self.join(2 * PATIENCE)
        rank_0, self._ranks = {0: self._ranks[0]}, {}  # rank 0 does not wait for others any longer
        if state != "lost" or self._now - start > PATIENCE:
            return self._beat.message
        return self._beat.message or find_culprit(rank_0, math.inf, 0)  # the store does not answer

    def run(self) -> None:
        """Watch until this rank reports its end. On rank 0, watch until all ranks report theirs."""
        beat, store = self._beat, self._group.get_group_store().clone()  # the original may be busy
        run_number = store.add(f"rank_watch/{self._rank}", 1)
        store = PrefixStore(f"rank_watch/{run_number}", store)
        try:
            while self._exchange(store) and (not beat.message or self._has_left.wait(PATIENCE)):
                beat.message = beat.message or find_culprit(self._ranks, self._now, self._timeout)
                time.sleep(INTERVAL)
                self._now += INTERVAL  # a clock that stands still while this process is suspended
        except RuntimeError:  # the process that holds the store ended
            beat.message = beat.message or find_culprit({0: self._ranks[0]}, math.inf, 0)
            self._has_left.wait(PATIENCE)
        if beat.message and not self._has_left.is_set():  # the main thread did not raise by itself
            print(f"[rank {self._rank}] {beat.message}", file=sys.stderr, flush=True)
            launcher: Any = self._trainer.strategy.launcher
            for process in [*multiprocessing.active_children(), *getattr(launcher, "procs", [])]:
                process.kill()  # loading processes, and ranks that can't end by themselves
            os._exit(1)

    def _exchange(self, store: Store) -> bool:
        """Write a heartbeat, read the heartbeats of other ranks, and return whether to continue."""
        beat, state = self._beat, self._state  # read before the failure, which `leave` sets first
        beat.message = beat.message or self._failure
        beat.state = "ended" if beat.message and state == "lost" else state
        frame = sys._current_frames()[self._main_thread]
        while frame.f_back and frame.f_code.co_filename.startswith(_INSTALLED):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        beat.beats, beat.place = beat.beats + 1, f"at step {self._trainer.global_step}, in {place}"
        with suppress(AttributeError, RuntimeError):  # torch has no public name for it
            beat.collectives = self._group._get_sequence_number_for_group()
        store.set(str(self._rank), json.dumps(asdict(beat)))
        for rank, before in self._ranks.items():
            machine, _, number = before.process.rpartition(" ")
            died = beat.process.startswith(f"{machine} ") and not _live_process(number)
            # `compare_set` writes if the key is missing, and returns the value in the store.
            other = Heartbeat(**json.loads(store.compare_set(str(rank), "", "{}")))
            other.heard = self._now if other.beats != before.beats else before.heard
            other.heard = -math.inf if died else other.heard
            same = (other.collectives, other.state) == (before.collectives, before.state)
            other.since = before.since if same else self._now
            self._ranks[rank] = other
        awaited = self._ranks.values() if self._rank == 0 else [self._beat]
        return any(each.state != "ended" and each.heard > -math.inf for each in awaited)


def _live_process(number: int | str) -> str:
    """Return machine and id of a running process; "" if it has ended, or outside Linux."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        if Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] not in "ZX":
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.readlink('/proc/self/ns/pid')} {number}"
    return ""
