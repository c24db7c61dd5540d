"""End all ranks when one of them fails, dies or hangs, with a message that names it.

A thread of each rank writes heartbeats into the store of the process group. Rank 0 reads those of
all ranks, the others read that of rank 0. Who detects a failure writes a message into the store.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.distributed_c10d import PrefixStore, Store

INTERVAL = 0.25  # seconds between heartbeats
PATIENCE = 5.0  # seconds to wait for reports of other ranks, and for the main thread to end
_CONNECTION = re.compile(r"gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)


class RankWatch(Callback):
    """Ends all ranks when one fails, dies or hangs, with a message that names it.

    The other ranks print the message, such as "rank 1 has kept the others waiting for 60 s at
    step 17, in data.py:33 (read)", and end with exit code 1. If the failure breaks a collective,
    the main thread raises its error with the message as a note. The death of a process on another
    machine than rank 0 is noticed when it breaks a collective, or after the timeout. `SystemExit`
    and `KeyboardInterrupt` are reported only by ranks whose collectives they break.

    All ranks need the callback; list it first.

    Args:
        timeout: seconds that a rank may be silent or keep others waiting, >= 3; None is the timeout
            of the strategy's collectives, 1800 s by default.

    Attributes:
        verdict: the message, if a failure of another rank broke a collective here; else None.

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
        """Start watching, before anything in the run can fail."""
        self.verdict = None
        if trainer.world_size > 1 and dist.is_initialized():
            self._watch = _Watch(trainer, self.timeout)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, since this rank is done."""
        if self._watch is not None:
            self._watch.leave("ended")
            self._watch = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report the exception to the other ranks, or get its cause from them."""
        if self._watch is None:  # raised before `setup`
            self.setup(trainer, pl_module, "")
        watch, self._watch = self._watch, None
        if watch is None:
            return
        broken = isinstance(exception, RuntimeError) and _CONNECTION.search(str(exception))
        if broken or isinstance(exception, dist.DistError):
            if message := watch.leave("lost"):
                self.verdict = message
                exception.add_note(message)
        elif isinstance(exception, SystemExit | KeyboardInterrupt):
            watch.leave("ended")
        else:
            text = " ".join("".join(traceback.format_exception_only(exception)).split())[:300]
            failure = f"rank {trainer.global_rank} failed at step {trainer.global_step}: {text}"
            watch.leave("ended", f"{failure}; see its output.")


@dataclass
class Heartbeat:
    """State of a rank, which it writes into the store several times a second."""

    beats: int = 0  # number of heartbeats; 0 before the first
    step: int = 0
    collectives: int = 0  # collectives entered; the others wait for a rank with a smaller number
    age: float = 0.0  # seconds since the rank entered its last collective
    place: str = ""  # position of the main thread in the code
    process: str = ""  # machine and process id
    state: str = "running"  # or "lost" (its collective broke), "ended", "died"
    left: float = 0.0  # seconds since its main thread ended or lost the others
    heard: float = 0.0  # time at which the reader received this heartbeat


def find_culprit(
    ranks: Mapping[int, Heartbeat], now: float, timeout: float, lost: bool = False
) -> str:
    """Message that names the rank that ended the run for all; "" if there is none.

    Names a dead rank first, then a silent rank, then a rank that the others wait for. Silence and
    waiting count after `timeout` seconds, or after `PATIENCE` if a collective has broken (`lost`).
    In that case a rank that ended without a failure is named last.
    """
    limit = PATIENCE if lost else timeout
    running = [beat for beat in ranks.values() if beat.state in ("running", "lost")]
    causes: list[tuple[int, float, int, str]] = []  # (priority, order within it, rank, text)
    for rank, beat in ranks.items():
        silent, at = now - beat.heard, f"at step {beat.step}"
        ahead = [other.age for other in running if other.collectives > beat.collectives]
        waited = min(beat.age, max(ahead, default=0.0))
        if beat.state == "died":
            text = f"ended without a word, last heard of {at}: killed, crashed or out of memory"
            causes.append((0, beat.heard, rank, text))
        elif beat.state == "running" and silent > limit:
            text = f"was last heard of {at}, {silent:.0f} s ago: killed, stopped or stuck"
            causes.append((1, -silent, rank, text))
        elif beat.state == "running" and waited > limit:
            text = f"has kept the others waiting for {waited:.0f} s {at}, in {beat.place}"
            causes.append((2, beat.collectives, rank, text))
        elif beat.state == "ended" and lost:
            causes.append((3, -beat.left, rank, f"ended {at} without the others"))
    _, _, rank, text = min(causes, default=(0, 0.0, 0, ""))
    return f"rank {rank} {text}; see its output." if text else ""


class _Watch:
    """Threads that exchange heartbeats, detect a failed rank, and end this process if needed."""

    def __init__(self, trainer: Trainer, timeout: float | None) -> None:
        self._group: Any = dist.group.WORLD
        self._timeout = timeout or self._group.get_group_store().timeout.total_seconds()
        self._trainer, self._rank = trainer, dist.get_rank()
        self._main_thread = threading.get_ident()
        watched = range(dist.get_world_size()) if self._rank == 0 else [0]
        self._ranks = {rank: Heartbeat() for rank in watched}  # as read from the store
        self._own = Heartbeat(process=_process_name())  # as written into it
        self._store: Store | None = None  # a connection of its own
        self._is_store_gone, self._run_number = False, 0
        self._now = self._collective_time = self._left_time = 0.0
        self._state, self._message = "running", ""
        self._has_left, self._is_closing = threading.Event(), threading.Event()
        loops = self._exchange_heartbeats, self._judge_ranks  # the first may hang in the store
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def leave(self, state: str, failure: str = "") -> str:
        """Report how the main thread ended and stop watching; return the message, or "".

        Waits until the report is in the store. Rank 0 may take the store with it, so it waits until
        no rank needs it. A rank that has lost the others waits for a message.
        """
        self._message = self._message or failure  # before the state, which is read first
        self._left_time, self._state = self._now, state
        self._has_left.set()
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline:
            states = {b.state for b in (self._ranks.values() if self._rank == 0 else [self._own])}
            needs_no_store = self._is_store_gone and (state != "lost" or self._message)
            if needs_no_store or states <= {"ended", "died"}:
                break
            time.sleep(0.02)
        self._is_closing.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        return self._message

    def _exchange_heartbeats(self) -> None:
        """Write and read heartbeats; hangs if the process that holds the store hangs."""
        while not self._is_closing.wait(INTERVAL if self._ranks[0].beats else 0.02):
            running = [rank for rank, beat in self._ranks.items() if beat.state == "running"]
            dead = [rank for rank in running if _has_died(self._ranks[rank].process)]
            try:
                if not (self._is_store_gone and dead):  # a new connection may take long
                    self._exchange()
                    self._is_store_gone = False
            except RuntimeError:  # the process that holds the store ended, or the connection broke
                self._store, self._is_store_gone = None, True
            for rank in dead:
                if self._ranks[rank].state == "running":  # according to its last heartbeat
                    self._ranks[rank].state = "died"

    def _exchange(self) -> None:
        """Write a heartbeat and the message, if any; read those of other ranks."""
        if self._store is None:
            store = self._group.get_group_store().clone()  # opens a connection
            self._run_number = self._run_number or store.add(f"rank_watch/{self._rank}", 1)
            self._store = PrefixStore(f"rank_watch/{self._run_number}", store)
        # `compare_set` writes if the key is missing, and returns the value in the store.
        state, message = self._state, self._message
        if message := self._store.compare_set("message", "", message).decode():
            self._message, state = message, "ended"
        collectives = 0
        with suppress(AttributeError, RuntimeError):  # torch has no public name for it
            collectives = self._group._get_sequence_number_for_group()
        if collectives != self._own.collectives:
            self._collective_time = self._now
        own = replace(self._own, beats=self._own.beats + 1, state=state, collectives=collectives)
        own.step, own.place = self._trainer.global_step, _location(self._main_thread)
        own.age, own.left = self._now - self._collective_time, self._now - self._left_time
        self._store.set(str(self._rank), json.dumps(asdict(own)))
        self._own = own
        for rank, before in self._ranks.items():
            beat = Heartbeat(**json.loads(self._store.compare_set(str(rank), "", "{}")))
            if beat.beats != before.beats:
                self._ranks[rank] = replace(beat, heard=self._now)

    def _judge_ranks(self) -> None:
        """Look for a culprit, and end this process if there is one."""
        while not self._is_closing.wait(INTERVAL):
            self._now += INTERVAL  # a clock that stands still while this process is suspended
            if self._message:
                self._end_process()
            elif self._rank == 0:  # silence counts only while its own heartbeat arrives
                lost = any(b.state == "lost" and b.left > PATIENCE for b in self._ranks.values())
                now = self._ranks[0].heard
                self._message = find_culprit(self._ranks, now, self._timeout, lost)
            else:  # rank 0 or its launcher holds the store
                lost = self._state == "lost" and self._now - self._left_time > PATIENCE
                lost = lost or self._is_store_gone
                self._message = find_culprit(self._ranks, self._now, self._timeout, lost)

    def _end_process(self) -> None:
        """Print the message and end this process, unless its main thread raises by itself."""
        if not self._has_left.wait(0.5):
            print(f"[rank {self._rank}] {self._message}", file=sys.stderr)
            if self._message.startswith(f"rank {self._rank} "):
                traceback.print_stack(sys._current_frames()[self._main_thread])
        if self._has_left.wait(PATIENCE):
            return
        for child in multiprocessing.active_children():  # DataLoader workers
            child.kill()
        launcher: Any = self._trainer.strategy.launcher
        if self._rank == 0 and hasattr(launcher, "kill"):
            time.sleep(1.0)  # lets the other ranks end by themselves, except one that hangs
            with suppress(OSError):
                launcher.kill(signal.SIGKILL)
        sys.stdout.flush()
        os._exit(1)


def _process_name() -> str:
    """Machine and id of this process; "" if the system does not provide them."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    return ""


def _has_died(process: str) -> bool:
    """Whether a process, as named by `_process_name`, has died; False on other machines."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != _process_name().rpartition(" ")[0]:
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _location(thread: int) -> str:
    """Position of a thread in the code: its innermost line outside installed packages."""
    stack = traceback.walk_stack(sys._current_frames()[thread])
    lines = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack]
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    users = [line for line in lines if not line[0].startswith(("<", *installed))]
    return "{}:{} ({})".format(*(users or lines)[0])
