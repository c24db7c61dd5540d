"""How ranks hear of each other's ends: a hub on rank 0, and on every rank a thread that beats.

Connections, and not keys in the process group's store: the system closes those of a process that
dies, so its death is known at once, and that of rank 0 to all. The store only tells where the hub
is. A line is a JSON object; nothing that is read is ever run.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from lit_diffusion.callbacks.rank_verdict import (
    PATIENCE,
    Seen,
    Verdict,
    gone,
    left,
    silent,
    unanswered,
    verdict,
)

BEAT = 1.0
"""Seconds between signs of life."""

_PACE = 0.2
"""Seconds between looks at all ranks."""

_LONGEST = 1 << 16  # of a line, in bytes

Message = dict[str, Any]


class Store(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """The value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""


class Progress(NamedTuple):
    """How far a rank is; see `rank_verdict.Seen`."""

    step: int
    collectives: int
    where: str


class Clock:
    """Seconds in which this thread could have listened.

    Time in which the whole process stood still, as when a scheduler suspends a job, does not count:
    what the others said in it has yet to be read.

    Example:
        >>> Clock().now() < 2 * BEAT
        True
    """

    def __init__(self) -> None:
        self._last, self._now = time.monotonic(), 0.0

    def now(self) -> float:
        """Seconds since the start, of which each call adds two beats at most."""
        at = time.monotonic()
        self._now += min(at - self._last, 2 * BEAT)
        self._last = at
        return self._now


class Line:
    """A connection that carries JSON objects, one a line.

    Args:
        connection: that this takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)
        self.socket = connection
        self._buffer = b""
        self._sending = threading.Lock()
        self._mute = False
        _open.add(connection)

    def send(self, message: Message) -> None:
        """Send. An end that does not take it is sent no more."""
        with self._sending:
            try:
                if not self._mute:
                    self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._mute = True

    def wait(self, seconds: float) -> bool:
        """Whether there is something to read, before so many seconds are over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def read(self) -> list[Message] | None:
        """The objects that have come; None at the end."""
        try:
            data = self.socket.recv(_LONGEST)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError):  # the last from a stranger's nesting
            return None
        return messages if data and len(self._buffer) < _LONGEST else None

    def close(self) -> None:
        """Say no more, and let go when the other end does: else the system may lose what it has."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(BEAT)
            while self.socket.recv(_LONGEST):
                pass
        self.socket.close()


_open: WeakSet[socket.socket] = WeakSet()


def _close_in_child() -> None:
    """A loading process must not hold open what tells of its parent's death."""
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_close_in_child)


class Hub(threading.Thread):
    """On rank 0: listens to all ranks, and tells all of them who has ended the run.

    Args:
        world_size: number of ranks.
        timeout: seconds that a rank may be silent or waited for.
        store: of the process group, for this thread alone.
    """

    def __init__(self, world_size: int, timeout: float, store: Store) -> None:
        super().__init__(name="rank-hub", daemon=True)
        self._ranks = [Seen(heard=0.0) for _ in range(world_size)]
        self._timeout = timeout
        self._store = store
        self._token = secrets.token_hex(16)
        self._lines: dict[Line, int | None] = {}
        self._last: Message | None = None
        self._has_news = False  # of a rank that came or ended
        self._clock = Clock()
        self._server = _server()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        port = self._server.getsockname()[1]
        store.set("hub", json.dumps({"host": host, "port": port, "token": self._token}))

    def run(self) -> None:
        """Listen until rank 0 has ended and the last line is closed."""
        try:
            self._serve()
        except BaseException:  # a mistake in here is no reason to end a run
            self._tell({"kind": "done", "step": 0, "said": "its hub failed"})
            raise
        finally:
            self._selector.close()
            self._server.close()

    def _serve(self) -> None:
        beaten = judged = time.monotonic()
        while self._is_needed():
            for key, _ in self._selector.select(_PACE):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            # Not for every beat of hundreds of ranks.
            if self._has_news or time.monotonic() - judged >= _PACE:
                judged, self._has_news = time.monotonic(), False
                self._look_in_store()
                self._judge()
            if time.monotonic() - beaten >= BEAT:
                beaten = time.monotonic()
                self._tell({"kind": "beat", "step": self._ranks[0].step})

    def expects_more(self) -> bool:
        """Whether ranks have yet to come, and be told; those that lost the others wait for it."""
        return any(not seen.here and seen.ended in ("", "lost") for seen in self._ranks)

    def _is_needed(self) -> bool:
        """Until rank 0 has ended, all lines are closed, and who is yet to come had time to."""
        first = self._ranks[0]
        waits = self.expects_more() and self._clock.now() - first.since < PATIENCE
        return bool(self._lines) or not first.ended or waits

    def _accept(self) -> None:
        try:
            line = Line(self._server.accept()[0])
        except OSError:  # gone again, or this process has no room for it
            time.sleep(BEAT / 10)
            return
        self._lines[line] = None
        self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        messages = line.read()
        for message in messages or []:
            rank = self._lines[line]
            if rank is not None:
                self._hear(rank, message)
            elif isinstance(message, dict) and message.get("token") == self._token:
                self._welcome(line, message["rank"])
            else:
                messages = None  # a stranger
                break
        if messages is None:
            self._drop(line)

    def _welcome(self, line: Line, rank: int) -> None:
        self._lines[line] = rank
        self._has_news = True
        if self._last is not None:
            line.send(self._last)

    def _hear(self, rank: int, message: Message) -> None:
        seen, now = self._ranks[rank], self._clock.now()
        seen.beat(now, message["step"], message["collectives"], message["where"])
        kind = message["kind"]
        if kind == "beat":
            return
        seen.end(now, kind, message["said"])
        self._has_news = True
        if rank == 0 and kind in ("left", "done") and self._last is None:
            self._tell({"kind": kind, "step": seen.step, "said": seen.said})

    def _drop(self, line: Line) -> None:
        rank = self._lines.pop(line)
        self._selector.unregister(line.socket)
        line.socket.close()
        if rank is not None:
            self._ranks[rank].end(self._clock.now(), "gone")
            self._has_news = True

    def _look_in_store(self) -> None:
        """For the ends of ranks that did not come here."""
        for rank, seen in enumerate(self._ranks):
            with suppress(RuntimeError):
                if not (seen.here or seen.ended) and self._store.check([f"end/{rank}"]):
                    end = json.loads(self._store.get(f"end/{rank}"))
                    seen.step = end["step"]
                    seen.end(self._clock.now(), end["kind"], end["said"])

    def _judge(self) -> None:
        if self._last is None:
            found = verdict(self._ranks, self._clock.now(), self._timeout)
            if found is not None:
                self._tell({"kind": "verdict", "rank": found.rank, "text": found.text})

    def _tell(self, message: Message) -> None:
        """Tell all ranks; rank 0 last, whose process may end with what it hears."""
        if message["kind"] != "beat":
            self._last = message
        known = [(rank, line) for line, rank in self._lines.items() if rank is not None]
        for _, line in sorted(known, key=lambda pair: -pair[0]):
            line.send(message)


def _server() -> socket.socket:
    """Listens on all interfaces, as torch's store does: MASTER_ADDR may be a loopback at home."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0))
    _open.add(server)
    return server


class Member(threading.Thread):
    """On every rank: beats, and listens for who has ended the run.

    Args:
        rank: of this process.
        timeout: seconds that rank 0 may be silent or absent.
        store: of the process group, for this object alone.
        progress: asked for every beat.
        heard: called in this thread with the verdict, once.
        warn: called in this thread where rank 0 can't be reached.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        store: Store,
        progress: Callable[[], Progress],
        heard: Callable[[Verdict], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._rank, self._timeout, self._store = rank, timeout, store
        self._progress, self._heard, self._warn = progress, heard, warn
        self._line: Line | None = None
        self._to_tell: Message | None = None
        self._meeting = threading.Lock()
        self._clock = Clock()
        self._hub = Seen(heard=0.0)
        self._closing = threading.Event()
        self._told = threading.Event()
        self._verdict: Verdict | None = None

    def run(self) -> None:
        """Beat and listen until the main thread is done or there is a verdict."""
        try:
            self._follow()
        except Exception as error:  # a mistake in here is no reason to end a run
            self._warn(f"rank {self._rank} is watched no more: {type(error).__name__}: {error}.")
            self._told.set()
            if self._line is not None:
                self._line.send({"kind": "done", "said": "", **Progress(0, 0, "")._asdict()})
        if self._line is not None:
            self._line.close()

    def _follow(self) -> None:
        self._connect()
        while self._line is not None and self._verdict is None and not self._closing.is_set():
            self.tell("beat")
            self._listen(self._line)
        if self._verdict is not None:
            self._told.set()
            self._heard(self._verdict)

    def tell(self, kind: str, said: str = "") -> None:
        """Tell the hub how far this rank is, or how it ended; the store, where there is no hub."""
        message = {"kind": kind, "said": said, **self._progress()._asdict()}
        with self._meeting:
            if self._line is not None:
                self._line.send(message)
            else:
                self._to_tell = message
                self._leave_in_store(message)

    def wait(self, seconds: float) -> Verdict | None:
        """The verdict, or that rank 0 left; None if nothing is heard in so many seconds."""
        self._told.wait(seconds)
        if self._verdict is None and self._hub.ended:
            said = self._hub.said or self._hub.ended
            return Verdict(0, left(0, self._hub.step, said))
        return self._verdict

    def finish(self) -> None:
        """Listen no more."""
        self._closing.set()

    def _connect(self) -> None:
        while self._line is None and self._verdict is None and not self._closing.is_set():
            try:
                self._try_to_connect()
            except RuntimeError:  # of the store, which rank 0 hosts
                self._verdict = Verdict(0, unanswered(0))
            if (now := self._clock.now()) > self._timeout:
                self._verdict = Verdict(0, silent(0, self._hub, now))

    def _try_to_connect(self) -> None:
        if self._store.check(["hub"]):
            hub = json.loads(self._store.get("hub"))
            try:
                connection = socket.create_connection((hub["host"], hub["port"]), timeout=30.0)
            except OSError as error:
                self._do_without(f"{hub['host']}:{hub['port']} ({error})")
                return
            line = Line(connection)
            line.send({"token": hub["token"], "rank": self._rank})
            self._hub.beat(self._clock.now(), 0, 0, "")
            with self._meeting:
                self._line = line
                if self._to_tell is not None:
                    line.send(self._to_tell)
        else:
            self._closing.wait(BEAT / 20)

    def _do_without(self, address: str) -> None:
        """A network that lets nothing through is no reason to end a run."""
        if self._to_tell is None:  # else the hub may have read it, and be done
            self._leave_in_store({"kind": "done", "said": "", "step": 0})
            self._warn(f"rank {self._rank} is not watched: it can't reach rank 0 at {address}.")
        self._told.set()
        self.finish()

    def _listen(self, line: Line) -> None:
        """Read for a beat, or until something comes."""
        if self._hub.ended:
            self._closing.wait(BEAT)  # rank 0 says no more
        elif line.wait(BEAT):
            messages = line.read()
            for message in messages or []:
                self._hear(message)
            if messages is None and not self._hub.ended and self._verdict is None:
                self._verdict = Verdict(0, gone(0, self._hub.step))
        if self._verdict is None:
            self._doubt_hub(self._clock.now())

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "verdict":
            self._verdict = Verdict(message["rank"], message["text"])
            return
        self._hub.beat(self._clock.now(), message["step"], 0, "")
        if kind != "beat":
            self._hub.end(self._clock.now(), kind, message["said"])
            self._told.set()

    def _doubt_hub(self, now: float) -> None:
        """Rank 0 may have stopped, or left ranks that still wait for it."""
        if not self._hub.ended and now - self._hub.heard > self._timeout:
            self._verdict = Verdict(0, silent(0, self._hub, now))
        elif self._hub.ended == "left" and now - self._hub.since > self._timeout:
            self._verdict = self.wait(0)

    def _leave_in_store(self, end: Message) -> None:
        """For those who have yet to come."""
        with suppress(RuntimeError):
            self._store.set(f"end/{self._rank}", json.dumps(end))
