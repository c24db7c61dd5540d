"""A guard that stops what no file may cause: network, other programs, writes elsewhere.

It is an audit hook (PEP 578), which cannot be taken away, so it looks at a variable that says
whether anybody is guarded. What it stops raises a BaseException, which no `except Exception` hides,
and is remembered for whoever asks afterwards.
"""

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NETWORK = (
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
    *("socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request", "http.client.connect"),
    *("ftplib.connect", "smtplib.connect", "webbrowser.open"),
)
PROGRAMS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"),
    *("os.forkpty", "os.startfile", "os.kill", "os.killpg", "pty.spawn"),
)
WRITES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.truncate", "os.utime", "os.setxattr"), (0,)),
    **dict.fromkeys(("os.mkdir", "os.chmod", "os.chown", "os.removexattr"), (0,)),
    **dict.fromkeys(("os.link", "os.symlink"), (1,)),
    **dict.fromkeys(("os.rename", "shutil.move"), (0, 1)),
    "sqlite3.connect": (0,),
}
"""Event -> which of its arguments are paths that it changes."""

UNPICKLED = ("numpy", "_codecs", "collections", "builtins.bytearray", "torch", "tensorboard")
"""Packages of which an ordinary unpickler finds parts in files that are checked beforehand."""

_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Stopped(BaseException):
    """Somebody did what they must not."""


class TooLong(BaseException):
    """Somebody did not come to an end."""


@dataclass
class Guard:
    """What is allowed, and what was stopped.

    Args:
        folders: that may be written to.
        strangers: names of modules that must not be imported.
    """

    folders: tuple[Path, ...]
    strangers: tuple[str, ...] = ()
    stopped: list[str] = field(default_factory=list)

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        if event in NETWORK or event in PROGRAMS:
            self._stop(event, args)
        elif event == "open":
            self._look_at_open(*args[:3])
        elif event in WRITES:
            directory = args[-1] if isinstance(args[-1], int) else -1
            for i in WRITES[event]:
                self._look_at_path(event, args[i], directory)
        elif event == "import" and str(args[0]).split(".")[0] in self.strangers:
            self._stop(event, args[:1])
        elif event == "pickle.find_class" and not f"{args[0]}.{args[1]}".startswith(UNPICKLED):
            self._stop(event, args)

    def _look_at_open(self, path: Any, mode: str | None, flags: int) -> None:
        if not isinstance(path, int) and (set(mode or "") & set("wax+") or flags & _CHANGING):
            self._look_at_path("open", path, -1)

    def _look_at_path(self, event: str, path: Any, directory: int) -> None:
        if isinstance(path, int) or os.fsdecode(path) == os.devnull:
            return
        beside = "" if directory < 0 else os.readlink(f"/proc/self/fd/{directory}")
        where = Path(os.path.realpath(os.path.join(beside, os.fsdecode(path))))
        if not any(where == folder or folder in where.parents for folder in self.folders):
            self._stop(event, (str(where),))

    def _stop(self, event: str, args: tuple[Any, ...]) -> None:
        self.stopped.append(f"{event} {args!r:.200}")
        raise Stopped(self.stopped[-1])


_standing: list[Guard] = []
_looking = threading.local()


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _standing or getattr(_looking, "now", False):
        return
    _looking.now = True  # what the guard itself looks up is nobody's business
    try:
        _standing[-1].look(event, args)
    finally:
        _looking.now = False


sys.addaudithook(_hook)


@contextlib.contextmanager
def guarded(guard: Guard, seconds: float, bytes_more: int) -> Iterator[None]:
    """Run under a guard, for at most so long and with at most so much more memory."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    with _time_limit(seconds), _memory_limit(bytes_more):
        _standing.append(guard)
        try:
            yield
        finally:
            _standing.remove(guard)
            sys.dont_write_bytecode = before


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """An alarm, and an end of the process where C code does not let Python hear it."""

    def ring(number: int, frame: object) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(5 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory_limit(bytes_more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + bytes_more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
