"""When one of several ranks fails, dies or hangs, the others end too and say which one it was.

A thread of each rank writes heartbeats into the store of the process group and reads the others'.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.distributed_c10d import PrefixStore, Store

PATIENCE = 5.0
"""Seconds for a cause to become known, and for a main thread to end by itself."""

_CONNECTION = re.compile(r"gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)


class RankWatch(Callback):
    """Ends all ranks with a message that names the one that failed, died or hangs.

    The message is printed to stderr on each of the others, such as "rank 1 has kept the others
    waiting for 60 s at step 17, in data.py:33 (read)". A collective that breaks because of it
    raises in the main thread, with the message as a note; where nothing is raised within five
    seconds, as on a rank that hangs, the process ends with exit code 1. A death on another machine
    is noticed when it breaks a collective, or after the timeout. A rank that works alone for long
    is not taken for dead. `SystemExit` and `KeyboardInterrupt` are no failures: only ranks that
    they leave behind report them.

    All ranks need the callback, best as the first in their list.

    Args:
        timeout: seconds that a rank may be silent or waited for, >= 3; None is the timeout of the
            strategy's collectives, 1800 s by default.

    Attributes:
        verdict: the message, if another rank ended this one by a broken collective; else None.

    Example:
        >>> trainer = Trainer(callbacks=[RankWatch(timeout=300)], accelerator="cpu", logger=False)
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout >= 3.0:
            raise ValueError(f"timeout must be at least 3 seconds, got {timeout}.")
        self.timeout = timeout
        self.verdict: str | None = None
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start to watch, before anything of the run can fail."""
        self.verdict = None
        if trainer.world_size > 1 and dist.is_initialized():
            try:
                self._watch = _Watch(trainer, self.timeout)
                self._watch.meet()
            except Exception as error:  # no reason to end a run, or to hide what ended it
                print(f"this rank is not watched: {error!r}.", file=sys.stderr)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, since this rank is done."""
        if self._watch is not None:
            self._watch.leave("done")
            self._watch = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report the exception to the other ranks, or learn from them what caused it."""
        if self._watch is None:  # raised before `setup`
            self.setup(trainer, pl_module, "")
        watch, self._watch = self._watch, None
        broken = isinstance(exception, RuntimeError) and _CONNECTION.search(str(exception))
        end = "lost" if broken or isinstance(exception, dist.DistError) else "failed"
        if isinstance(exception, SystemExit | KeyboardInterrupt):
            end = "left"
        text = " ".join("".join(traceback.format_exception_only(exception)).split())[:300]
        verdict = watch.leave(end, text) if watch is not None else None
        if verdict is not None and end == "lost":
            self.verdict = verdict
            exception.add_note(verdict)


class Heartbeat(NamedTuple):
    """What a rank writes into the store several times a second."""

    beats: int = 0  # grows with each heartbeat; 0 before the first
    step: int = 0
    collectives: int = 0  # entered so far; the others wait for a rank that has entered fewer
    location: str = ""  # of the main thread in the code
    process: str = ""  # machine and process id
    # "done", "failed", "died", "left" on purpose, "lost" the others, or "informed" why they ended
    end: str = ""
    text: str = ""  # the exception that ended it


@dataclass
class RankState:
    """The last heartbeat of a rank, and when parts of it changed on the clock of the reader."""

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    heard: float = 0.0
    moved: float = 0.0  # into its last collective
    ended: float = 0.0

    def update(self, heartbeat: Heartbeat, now: float) -> None:
        """Replace the heartbeat."""
        before, self.heartbeat = self.heartbeat, heartbeat
        self.heard = now if heartbeat.beats != before.beats else self.heard
        self.moved = now if heartbeat.collectives != before.collectives else self.moved
        self.ended = now if heartbeat.end != before.end else self.ended


def find_culprit(
    ranks: Mapping[int, RankState], now: float, timeout: float, lost: bool = False
) -> tuple[int, str] | None:
    """The rank that ended the run for all, and a message that says how; None while none has.

    A failure outweighs a death, that a rank that is silent, and that one that others wait for. The
    last two have `timeout` seconds, or `PATIENCE` if a collective has broken (`lost`) without a
    cause that is known; then a rank that left on purpose is the last to be named.
    """
    limit = PATIENCE if lost else timeout
    running = [s for s in ranks.values() if s.heartbeat.end in ("", "lost", "informed")]
    causes: list[tuple[int, float, int, str]] = []  # severity, order within it, rank, text
    for rank, state in ranks.items():
        beat, silent, at = state.heartbeat, now - state.heard, f"at step {state.heartbeat.step}"
        ahead = [now - s.moved for s in running if s.heartbeat.collectives > beat.collectives]
        waited = min(now - state.moved, max(ahead)) if ahead and beat.beats else 0.0
        if beat.end == "failed":
            causes.append((0, state.ended, rank, f"failed {at}: {beat.text}"))
        elif beat.end == "died":
            text = f"ended without a word, last heard of {at}: killed, crashed or out of memory"
            causes.append((1, state.ended, rank, text))
        elif not beat.end and silent > limit:
            text = f"was last heard of {at}, {silent:.0f} s ago: killed, stopped or stuck"
            absent = f"has not come to the start of the run in {silent:.0f} s"
            causes.append((2, -silent, rank, text if beat.beats else absent))
        elif not beat.end and waited > limit:
            text = f"has kept the others waiting for {waited:.0f} s {at}, in {beat.location}"
            causes.append((3, beat.collectives, rank, text))
        elif beat.end == "left" and running and (lost or now - state.ended > limit):
            text = f"left {at} ({beat.text}) without the others"
            causes.append((4, state.ended, rank, text))
    if not causes:
        return None
    _, _, rank, text = min(causes)
    return rank, f"rank {rank} {text}; see its output."


class _Watch(threading.Thread):
    """Exchanges heartbeats, finds a culprit, and ends this process if its main thread does not."""

    def __init__(self, trainer: Trainer, timeout: float | None) -> None:
        super().__init__(name="rank-watch", daemon=True)
        world: Any = dist.group.WORLD
        self._group_store = world.get_group_store()
        self._store: Store | None = None
        self._timeout = timeout or self._group_store.timeout.total_seconds()
        self._trainer, self._rank, self._main = trainer, dist.get_rank(), threading.get_ident()
        self._ranks = {rank: RankState() for rank in range(dist.get_world_size())}
        self._interval = 0.25 * max(1.0, len(self._ranks) / 64)
        self._heartbeat = Heartbeat(process=_process_name())
        self._end, self._end_time, self._now = ("", ""), 0.0, 0.0
        self._run_number, self._store_is_gone = 0, False
        self._culprit: int | None = None
        self._message: str | None = None  # that names it
        self._has_met, self._has_left = threading.Event(), threading.Event()
        self._is_closing = threading.Event()

    def meet(self) -> None:
        """Start, and wait for a heartbeat of each rank: without one a dead rank seems late."""
        self.start()
        self._has_met.wait(PATIENCE)

    def leave(self, end: str, text: str = "") -> str | None:
        """Report how the main thread ended, and stop; the message that names the culprit, if any.

        Waits until this is in the store; on rank 0, with which the store may disappear, until no
        rank needs it. A rank that has lost the others waits for a culprit.
        """
        self._end, self._end_time = (end, text), self._now
        self._has_left.set()
        watched = self._ranks if self._rank == 0 else {self._rank: self._ranks[self._rank]}
        deadline = time.monotonic() + 2 * PATIENCE
        while self.is_alive() and time.monotonic() < deadline:
            others = [state for rank, state in watched.items() if rank != self._culprit]
            is_read = all(state.heartbeat.end not in ("", "lost") for state in others)
            if (is_read or self._store_is_gone) and (end != "lost" or self._message):
                break
            time.sleep(0.02)
        self._is_closing.set()
        self.join(PATIENCE)
        return self._message

    def run(self) -> None:
        """Watch until closed; an error in here is no reason to end a run."""
        try:
            self._run()
        except Exception as error:
            print(f"rank {self._rank} is watched no more: {error!r}.", file=sys.stderr)
            self._end = "done", ""
            self._exchange()
            self._has_met.set()

    def _run(self) -> None:
        exchange, last = threading.Thread(), time.monotonic()
        while not self._is_closing.wait(self._interval if self._has_met.is_set() else 0.02):
            dead = [s for s in self._ranks.values() if _has_died(s.heartbeat.process)]
            if begins := not exchange.is_alive():
                exchange = threading.Thread(target=self._exchange, daemon=True)
                exchange.start()
            exchange.join(self._interval)  # it hangs if the process with the store does
            # Time in which this process was stopped, as in a suspended job, does not count.
            now = time.monotonic()
            self._now, last = self._now + min(now - last, 4 * self._interval), now
            if self._store_is_gone or (begins and not exchange.is_alive()):
                for state in dead:  # whose last heartbeat, which may tell of an end, is read by now
                    if not state.heartbeat.end:
                        state.update(state.heartbeat._replace(end="died"), self._now)
            if self._culprit is None and (verdict := self._judge()):
                self._culprit, self._message = verdict
                threading.Thread(target=self._act, daemon=True).start()

    def _judge(self) -> tuple[int, str] | None:
        this_rank, zero = self._ranks[self._rank], self._ranks[0]
        lost = self._end[0] == "lost" and self._now - self._end_time > PATIENCE
        # While this rank cannot even read its own heartbeat, the silence of others means nothing,
        # except that of rank 0, with which the store may have disappeared.
        verdict = find_culprit(self._ranks, this_rank.heard, self._timeout, lost)
        if verdict is None and self._rank:
            lost = lost or self._store_is_gone
            verdict = find_culprit({0: zero}, self._now, self._timeout, lost)
        return verdict

    def _exchange(self) -> None:
        """Write a heartbeat and read those of all ranks."""
        end, text = self._end
        if end in ("", "lost") and self._culprit not in (None, self._rank):
            end = "informed"
        self._heartbeat = self._heartbeat._replace(
            beats=self._heartbeat.beats + 1,
            step=self._trainer.global_step,
            collectives=_count_collectives(),
            location=_location(self._main),
            end=end,
            text=text,
        )
        keys = [str(rank) for rank in self._ranks]
        try:
            if self._store is None:
                store = self._group_store.clone()  # a connection of its own
                self._run_number = self._run_number or store.add(f"rank_watch/{self._rank}", 1)
                self._store = PrefixStore(f"rank_watch/{self._run_number}", store)
                for key in keys:
                    self._store.compare_set(key, "", "[]")  # reading a missing key would block
            self._store.set(str(self._rank), json.dumps(self._heartbeat))
            heartbeats = [Heartbeat(*json.loads(each)) for each in self._store.multi_get(keys)]
        except Exception:  # the process with the store has ended, or the connection is broken
            self._store, self._store_is_gone = None, True
            return
        self._store_is_gone = False
        for state, heartbeat in zip(self._ranks.values(), heartbeats, strict=True):
            if heartbeat.beats != state.heartbeat.beats:
                state.update(heartbeat, self._now)
        if all(state.heartbeat.beats for state in self._ranks.values()):
            self._has_met.set()

    def _act(self) -> None:
        """Print the message and end this process, unless its main thread raises by itself."""
        if not self._has_left.wait(0.5):
            hangs = self._culprit == self._rank
            stack = traceback.format_stack(sys._current_frames()[self._main]) if hangs else []
            print(f"[rank {self._rank}] {self._message}\n", *stack, sep="", file=sys.stderr)
        if self._has_left.wait(PATIENCE):
            return
        for child in multiprocessing.active_children():  # that load data
            child.kill()
        launcher: Any = self._trainer.strategy.launcher
        if self._trainer.is_global_zero and hasattr(launcher, "kill"):
            time.sleep(1.0)  # the other ranks are about to end, but for one that can't
            with suppress(OSError):
                launcher.kill(signal.SIGKILL)
        sys.stdout.flush()
        os._exit(1)


def _process_name() -> str:
    """Name of this process among those of all machines; "" where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


def _has_died(process: str) -> bool:
    """Whether the process of a `_process_name` of this machine is dead."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != _process_name().rpartition(" ")[0]:
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _count_collectives() -> int:
    """Collectives of the default group that this process has entered; 0 if it does not say."""
    with suppress(AttributeError, RuntimeError):  # torch has no public name for it
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return 0


def _location(thread: int) -> str:
    """The line that a thread executes, of the innermost code that is not installed."""
    if (frame := sys._current_frames().get(thread)) is None:
        return "an unknown place"
    lines = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_stack(frame)]
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    users = [line for line in lines if not line[0].startswith(("<", *installed))]
    return "{}:{} ({})".format(*(users or lines)[0])
