"""Signals that a batch system sends: noted, and acted on when the program is ready for it.

A batch system signals all processes of a job. A handler that saved would do so in the middle of an
update, or of a collective that other ranks are not in; so it only makes a note.
"""

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

SAVED = 75
"""Exit code of a process that saved and is to be started again: EX_TEMPFAIL of sysexits.h."""

ECHO = 0.3
"""Seconds in which a second Ctrl-C is the first, which launchers such as torchrun pass on."""

BY_HAND = (signal.SIGINT, signal.SIGHUP)
"""Signals of a terminal: what ends of them is not to be started again by a loop of the shell."""

_active: "SignalNotes | None" = None


class SignalNotes:
    """Notes signals in place of being ended by them, from `start` to `stop`.

    Those that others have noted before are taken over; what is ignored before (nohup) stays so. A
    second Ctrl-C is a KeyboardInterrupt, as ever.

    Processes that are forked meanwhile, such as those that load data, are ended by their parent
    alone; they would die of signals to a whole job, and the run with them. So do processes that are
    started by other means than fork, as DataLoader does with another `multiprocessing_context`.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.received: signal.Signals | None = None
        self.signals = frozenset(signals)
        self.answer = ""  # printed at the first Ctrl-C
        self._before: dict[signal.Signals, Any] = {}
        self._outer: SignalNotes | None = None
        self._interrupted = math.inf  # when it was

    def start(self) -> None:
        """Begin; in the main thread only, as Python handles no signals in others."""
        global _active
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be handled where the Trainer runs in the main thread; call fit "
                "there, or leave SaveOnSignal out."
            )
        if self._before:
            self.stop()
        self.received = _active.received if _active is not None else None
        self._interrupted = math.inf
        self._outer, _active = _active, self
        for number in self.signals:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Handle the signals as before."""
        global _active
        if _active is self:
            _active = self._outer
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Have further signals do nothing, in a process that is about to end."""
        global _active
        _active = None
        for number in self._before:
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a later fit takes it over
            atexit.register(signal.signal, number, signal.SIG_IGN)  # Python gives handlers back

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > ECHO:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._interrupted > now:
            self._interrupted = now
            with suppress(OSError):
                os.write(2, self.answer.encode())  # print may be what was interrupted
        if self.received is None:
            self.received = signal.Signals(number)


class Stopped(KeyboardInterrupt):
    """A `signal` other than that of Ctrl-C ended what was done."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


class SavedOnSignal(SystemExit):
    """Ends a process that saved a checkpoint after so many steps because of a signal.

    With exit code 75; after a signal of the terminal with 128 and its number.
    """

    def __init__(self, number: int, step: int, path: Path) -> None:
        super().__init__(128 + number if number in BY_HAND else SAVED)
        self.signal, self.step, self.path = signal.Signals(number), step, path


def print_error(text: str) -> None:
    """Print to stderr, unless that is a terminal that is gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled((signal.SIGTERM, signal.SIGHUP), stop):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context whose end Ctrl-C, SIGTERM and SIGHUP wait for."""
    came: list[int] = []
    try:
        with _handled((signal.SIGTERM, *BY_HAND), lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            os.kill(os.getpid(), number)


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Context with a handler of signals that are not ignored, in the main thread."""
    main = threading.current_thread() is threading.main_thread()
    minded = [n for n in numbers if main and signal.getsignal(n) not in (None, signal.SIG_IGN)]
    before = {number: signal.signal(number, handler) for number in minded}
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, before[number])


@contextmanager
def noting() -> Iterator[None]:
    """Context in which SIGTERM and SIGUSR1 are noted for the fits that are about to be set up.

    Where it ends with the code of a signal, they stay without effect: another must not change it.
    """
    global _active
    notes = SignalNotes([signal.SIGTERM, signal.SIGUSR1])
    if threading.current_thread() is threading.main_thread():
        notes.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (SAVED, *(128 + n for n in BY_HAND)):
            _active = None  # what comes from now on is of no later fit in this process
        else:
            notes.stop()
        raise
    notes.stop()


def heed() -> None:
    """Handle signals as before, since nothing will be saved; one that was noted comes again."""
    notes = _active
    if notes is not None:
        notes.stop()
        if notes.received is not None:
            os.kill(os.getpid(), notes.received)


def _after_fork() -> None:
    """Block signals, and wait in a thread for a SIGTERM of the parent."""
    if _active is None:
        return
    signals = set(_active.signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_end_with, args=(os.getppid(), signals), daemon=True).start()


def _end_with(parent: int, signals: set[signal.Signals]) -> None:
    while True:
        came = signal.sigwaitinfo(signals)
        if came.si_pid == parent and came.si_signo == signal.SIGTERM:
            os._exit(0)


os.register_at_fork(after_in_child=_after_fork)
