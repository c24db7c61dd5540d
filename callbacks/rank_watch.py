"""End all ranks when one of them fails, dies or hangs, with a message that names it.

A thread of each rank writes heartbeats into the store of the process group. Rank 0 reads the
heartbeats of all ranks, the others read that of rank 0. A rank that detects a failure writes a
message into the store, which all ranks read.
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

INTERVAL = 0.25
"""Seconds between heartbeats."""

PATIENCE = 5.0
"""Seconds to wait for reports of other ranks, and for the main thread to end by itself."""

_CONNECTION = re.compile(r"gloo|nccl|monitoredbarrier|process ?group", re.IGNORECASE)


class RankWatch(Callback):
    """Ends all ranks when one fails, dies or hangs, with a message that names it.

    The other ranks print the message to stderr, such as "rank 1 has kept the others waiting for
    60 s at step 17, in data.py:33 (read)". If the failure breaks a collective, the main thread
    raises its error with the message as a note. If the main thread does not end within five
    seconds, for example on a rank that hangs, the process exits with code 1. The death of a process
    on another machine than rank 0 is noticed when it breaks a collective, or after the timeout.
    A rank that works alone for long does not count as dead. `SystemExit` and `KeyboardInterrupt`
    are not failures; they are reported only by ranks whose collectives they break.

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
            try:
                self._watch = _Watch(trainer, self.timeout)
            except Exception as error:  # must not end a run, nor hide the error that ended it
                print(f"this rank is not watched: {error!r}.", file=sys.stderr)

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
            self.verdict = watch.leave("lost") or None
            if self.verdict is not None:
                exception.add_note(self.verdict)
        elif isinstance(exception, SystemExit | KeyboardInterrupt):
            watch.leave("ended")
        else:
            text = " ".join("".join(traceback.format_exception_only(exception)).split())[:300]
            failure = f"rank {trainer.global_rank} failed at step {trainer.global_step}: {text}"
            watch.leave("ended", f"{failure}; see its output.")


@dataclass
class Heartbeat:
    """State of a rank, which the rank writes into the store several times a second."""

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
    if not causes:
        return ""
    _, _, rank, text = min(causes)
    return f"rank {rank} {text}; see its output."


class _Watch:
    """Thread that exchanges heartbeats, detects a failed rank, and ends this process if needed."""

    def __init__(self, trainer: Trainer, timeout: float | None) -> None:
        world: Any = dist.group.WORLD
        self._group_store = world.get_group_store()
        self._timeout = timeout or self._group_store.timeout.total_seconds()
        self._trainer, self._rank = trainer, dist.get_rank()
        self._main_thread = threading.get_ident()
        watched = range(dist.get_world_size()) if self._rank == 0 else (0, self._rank)
        self._ranks = {rank: Heartbeat() for rank in watched}
        self._store: Store | None = None  # separate connection of this thread
        self._is_store_gone, self._run_number = False, 0
        self._beat, self._now = Heartbeat(process=_process_name()), 0.0
        self._last_collective_time = 0.0
        self._state, self._message, self._left_time = "running", "", 0.0
        self._has_met_others, self._has_left = threading.Event(), threading.Event()
        self._is_closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        # A rank whose process the others do not know yet can only be missed when it dies.
        self._has_met_others.wait(PATIENCE)

    def leave(self, state: str, failure: str = "") -> str:
        """Report how the main thread ended and stop watching; return the message, or "".

        Waits until the report is in the store. Rank 0 may take the store with it, so it waits until
        no rank needs it. A rank that has lost the others waits for a message.
        """
        self._message = self._message or failure  # before the state, which `_exchange` reads first
        self._left_time, self._state = self._now, state
        self._has_left.set()
        watched = list(self._ranks) if self._rank == 0 else [self._rank]
        deadline = time.monotonic() + 2 * PATIENCE
        while self._thread.is_alive() and time.monotonic() < deadline:
            needs_no_store = self._is_store_gone and (state != "lost" or self._message)
            if needs_no_store or all(self._ranks[r].state in ("ended", "died") for r in watched):
                break
            time.sleep(0.02)
        self._is_closing.set()
        self._thread.join(PATIENCE)
        return self._message

    def _run(self) -> None:
        """Watch until closed; an error in this thread must not end the run."""
        try:
            self._watch_ranks()
        except Exception as error:
            print(f"rank {self._rank} is watched no more: {error!r}.", file=sys.stderr)
            last_beat = replace(self._beat, beats=self._beat.beats + 1, state="ended")
            with suppress(Exception):  # so that the others do not take this rank for dead
                self._store.set(str(self._rank), json.dumps(asdict(last_beat)))  # type: ignore[union-attr]

    def _watch_ranks(self) -> None:
        exchange, last = threading.Thread(), time.monotonic()
        while not self._is_closing.wait(INTERVAL if self._has_met_others.is_set() else 0.02):
            if not exchange.is_alive():
                exchange = threading.Thread(target=self._exchange, daemon=True)
                exchange.start()
            exchange.join(INTERVAL)  # hangs if the process that holds the store hangs
            # Time in which this process was suspended does not count.
            now = time.monotonic()
            self._now, last = self._now + min(now - last, 4 * INTERVAL), now
            if self._error is not None:
                raise self._error
            if self._message:
                self._end_process()
            elif verdict := self._judge():
                self._message = verdict

    def _judge(self) -> str:
        if self._rank == 0:  # silence counts only while its own heartbeat arrives
            lost = any(b.state == "lost" and b.left > PATIENCE for b in self._ranks.values())
            return find_culprit(self._ranks, self._ranks[0].heard, self._timeout, lost)
        lost = self._state == "lost" and self._now - self._left_time > PATIENCE
        lost = lost or self._is_store_gone  # rank 0 or its launcher holds the store
        return find_culprit({0: self._ranks[0]}, self._now, self._timeout, lost)

    def _exchange(self) -> None:
        """Write a heartbeat and the message, if any; read those of other ranks."""
        dead = [rank for rank, beat in self._ranks.items() if _has_died(beat.process)]
        if self._is_store_gone:  # nothing more to read, and a new connection may take long
            self._mark_died(dead)
        try:
            if self._store is None:
                store = self._group_store.clone()  # opens a new connection
                self._run_number = self._run_number or store.add(f"rank_watch/{self._rank}", 1)
                self._store = PrefixStore(f"rank_watch/{self._run_number}", store)
            # `compare_set` writes if the key is missing, and returns the value in the store.
            state, message = self._state, self._message
            if message := self._store.compare_set("message", "", message).decode():
                self._message, state = message, "ended"
            self._store.set(str(self._rank), json.dumps(asdict(self._next_heartbeat(state))))
            for rank, before in self._ranks.items():
                beat = Heartbeat(**json.loads(self._store.compare_set(str(rank), "", "{}")))
                if beat.beats != before.beats:
                    self._ranks[rank] = replace(beat, heard=self._now)
            self._is_store_gone = False
        except RuntimeError:  # the process that holds the store ended, or the connection broke
            self._store, self._is_store_gone = None, True
        except Exception as error:
            self._error = error
        has_heard_all = all(beat.beats for beat in self._ranks.values())
        if has_heard_all or self._message or self._is_store_gone or self._error:
            self._has_met_others.set()
        self._mark_died(dead)  # after reading their last heartbeats: they may have ended normally

    def _mark_died(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self._ranks[rank].state == "running":
                self._ranks[rank] = replace(self._ranks[rank], state="died")

    def _next_heartbeat(self, state: str) -> Heartbeat:
        collectives, before = 0, self._beat
        with suppress(AttributeError, RuntimeError):  # torch has no public name for it
            collectives = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        if collectives != before.collectives:
            self._last_collective_time = self._now
        self._beat = Heartbeat(
            beats=before.beats + 1,
            step=self._trainer.global_step,
            collectives=collectives,
            age=self._now - self._last_collective_time,
            place=_location(self._main_thread),
            process=before.process,
            state=state,
            left=self._now - self._left_time if self._has_left.is_set() else 0.0,
        )
        return self._beat

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
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()}"
    except OSError:
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
