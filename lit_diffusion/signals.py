"""Record signals of a batch system or a terminal, so that a run can react at a safe point.

A batch system signals all processes of a job. Handlers only record the signal. A handler that saved
a checkpoint could interrupt an update, or a collective that other ranks have not entered.
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

EXIT_SAVED = 75
"""Exit code of a process that saved and should be restarted: EX_TEMPFAIL of sysexits.h."""

ECHO_SECONDS = 0.3
"""A second SIGINT within this time counts as the same Ctrl-C: torchrun forwards it to its ranks."""

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals of a terminal. A shell loop must not restart a process that ended on one of them."""

_recorder: "SignalRecorder | None" = None  # the active one


class SignalRecorder:
    """Records signals between `start` and `stop`, during which they do not end the process.

    A recorder that starts inside another one takes over a signal that the outer one has received.
    Signals that were ignored before, as under nohup, stay ignored. A second Ctrl-C raises
    KeyboardInterrupt.

    Processes that are forked while signals are recorded, such as DataLoader workers, block these
    signals. Only their parent ends them, so a signal to the whole job does not kill the workers and
    thereby the run. Workers that are spawned (see `multiprocessing_context` of DataLoader) are not
    protected.

    Args:
        signals: signals to record.

    Attributes:
        received: the first signal received; None before that.
        ctrl_c_message: text to print to stderr at the first Ctrl-C.

    Example:
        >>> recorder = SignalRecorder([signal.SIGUSR1])
        >>> recorder.start()
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> recorder.received
        <Signals.SIGUSR1: 10>
        >>> recorder.stop()
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signals = frozenset(signals)
        self.received: signal.Signals | None = None
        self.ctrl_c_message = ""
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._outer: SignalRecorder | None = None
        self._ctrl_c_time = math.inf

    def start(self) -> None:
        """Start recording.

        Raises:
            ValueError: outside the main thread, because Python handles signals only there.
        """
        global _recorder
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be handled if the Trainer runs in the main thread; call fit "
                "there, or remove SaveOnSignal."
            )
        if self._previous_handlers:
            self.stop()
        self.received = _recorder.received if _recorder is not None else None
        self._ctrl_c_time = math.inf
        self._outer, _recorder = _recorder, self
        for number in self.signals:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._record)

    def stop(self) -> None:
        """Restore the previous handlers."""
        global _recorder
        if _recorder is self:
            _recorder = self._outer
        while self._previous_handlers:
            number, handler = self._previous_handlers.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ignore(self) -> None:
        """Ignore further signals in a process that is about to end."""
        global _recorder
        _recorder = None
        for number in self._previous_handlers:
            signal.signal(number, lambda *_: None)  # a later fit would leave SIG_IGN in place
            atexit.register(signal.signal, number, signal.SIG_IGN)  # Python resets handlers at exit

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._ctrl_c_time > ECHO_SECONDS:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._ctrl_c_time > now:
            self._ctrl_c_time = now
            with suppress(OSError):
                os.write(2, self.ctrl_c_message.encode())  # the signal may have interrupted print
        if self.received is None:
            self.received = signal.Signals(number)


@contextmanager
def record_signals() -> Iterator[None]:
    """Context that records SIGTERM and SIGUSR1 until a fit that starts inside it takes them over.

    If a run inside saves on a signal and exits, further signals have no effect, so that they cannot
    change the exit code.
    """
    global _recorder
    recorder = SignalRecorder([signal.SIGTERM, signal.SIGUSR1])
    if threading.current_thread() is threading.main_thread():
        recorder.start()
    try:
        yield
    except BaseException as error:
        codes = (EXIT_SAVED, *(128 + number for number in TERMINAL_SIGNALS))
        if isinstance(error, SystemExit) and error.code in codes:
            _recorder = None  # a later fit in this process must not inherit the signal
        else:
            recorder.stop()
        raise
    recorder.stop()


def redeliver_signal() -> None:
    """Stop recording signals, and redeliver one that was recorded.

    For processes that have nothing to save.
    """
    recorder = _recorder
    if recorder is not None:
        recorder.stop()
        if recorder.received is not None:
            os.kill(os.getpid(), recorder.received)


class InterruptedBySignal(KeyboardInterrupt):
    """Raised when a signal other than SIGINT interrupts the process."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


class SavedOnSignal(SystemExit):
    """Ends a process that saved a checkpoint at optimizer step `step` because of a signal.

    The exit code is 75, or 128 + n after a terminal signal n.
    """

    def __init__(self, number: int, step: int, path: Path) -> None:
        super().__init__(128 + number if number in TERMINAL_SIGNALS else EXIT_SAVED)
        self.signal, self.step, self.path = signal.Signals(number), step, path


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `InterruptedBySignal`, a KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context that holds back Ctrl-C, SIGTERM and SIGHUP, and delivers them at its end.

    Example:
        >>> with defer_signals():
        ...     text = "written in full, even if Ctrl-C is pressed"
    """
    deferred: list[int] = []
    try:
        signals = (signal.SIGTERM, *TERMINAL_SIGNALS)
        with _handle_signals(signals, lambda number, frame: deferred.append(number)):
            yield
    finally:
        for number in deferred:
            os.kill(os.getpid(), number)


@contextmanager
def _handle_signals(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Context that handles signals, except ignored ones; no-op outside the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n in numbers if is_main and signal.getsignal(n) not in (None, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number in previous:
            signal.signal(number, previous[number])


def print_error(text: str) -> None:
    """Print to stderr; do nothing if its terminal has been closed."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _after_fork() -> None:
    """Block the recorded signals in a forked process, except a SIGTERM sent by its parent.

    A thread waits for that SIGTERM, because a blocked signal calls no handler.
    """
    if _recorder is None:
        return
    parent, signals = os.getppid(), set(_recorder.signals)

    def wait() -> None:
        while True:
            info = signal.sigwaitinfo(signals)
            if info.si_pid == parent and info.si_signo == signal.SIGTERM:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=wait, daemon=True).start()


os.register_at_fork(after_in_child=_after_fork)
