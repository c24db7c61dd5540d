"""Record signals from a batch system or a terminal, so that a run can save a checkpoint later.

The handlers only record a signal. They do not save a checkpoint, because the signal may arrive in
the middle of an optimizer step, or during a collective that other ranks have not entered yet.
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
"""Exit code of a process that saved a checkpoint on a signal, and that should be started again.
The value is EX_TEMPFAIL of sysexits.h."""

ECHO_SECONDS = 0.3
"""Time in seconds within which a second SIGINT counts as the same Ctrl-C. A rank may get SIGINT
twice, from the terminal and from torchrun, which forwards it."""

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends on Ctrl-C and when it closes. A process that ends because of signal
n of these has the exit code 128 + n, so that a loop in a shell script does not start it again."""

_recorder: "SignalRecorder | None" = None  # the recorder that was started last, until it stops


class SignalRecorder:
    """Records signals between `start` and `stop`. Recorded signals do not end the process.

    A recorder that starts while another recorder is active copies `received` from that recorder. A
    signal that the process ignored before, such as SIGHUP under nohup, is still ignored. A second
    Ctrl-C raises KeyboardInterrupt.

    Processes that are forked while signals are recorded, such as DataLoader workers, block these
    signals. Otherwise, a signal that a batch system sends to all processes of a job would kill the
    workers, and their death would end the run. Only a SIGTERM from the parent process still ends a
    forked process. Workers that are spawned (see `multiprocessing_context` of DataLoader) do not
    block the signals. A forked process that starts a recorder of its own, such as a rank of the
    strategy "ddp_fork", records them.

    Args:
        signals: signals to record.

    Attributes:
        received: the first signal that was received; None if there was none.
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
            ValueError: if this is not the main thread, because Python handles signals only there.
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
        # A rank that was forked while signals were recorded (strategy "ddp_fork") blocks them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)

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
            # Not SIG_IGN, because a recorder of a later fit would leave it in place.
            signal.signal(number, lambda *_: None)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # Python resets handlers at exit

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._ctrl_c_time > ECHO_SECONDS:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self._ctrl_c_time > now:
            self._ctrl_c_time = now
            with suppress(OSError):
                # Not print, because the signal may have interrupted a call of print.
                os.write(2, self.ctrl_c_message.encode())
        if self.received is None:
            self.received = signal.Signals(number)


@contextmanager
def record_signals() -> Iterator[None]:
    """Context for a command that runs a fit. It records SIGTERM and SIGUSR1 before the fit starts.

    The fit reacts to a signal that arrived before its start. If the fit saves a checkpoint on a
    signal and exits, further signals have no effect, so that they cannot change the exit code.
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
    """Stop recording signals, and send this process the recorded signal again, if there is one.

    Call this function if there is no checkpoint to save. The signal then has its usual effect.
    """
    recorder = _recorder
    if recorder is not None:
        recorder.stop()
        if recorder.received is not None:
            os.kill(os.getpid(), recorder.received)


class InterruptedBySignal(KeyboardInterrupt):
    """KeyboardInterrupt that a signal other than SIGINT causes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


class SavedOnSignal(SystemExit):
    """Ends a process that saved a checkpoint because of a signal.

    The exit code is 75, or 128 + n if n is one of the `TERMINAL_SIGNALS`.

    Args:
        number: number of the signal.
        step: optimizer steps completed.
        path: path of the checkpoint.
    """

    def __init__(self, number: int, step: int, path: Path) -> None:
        super().__init__(128 + number if number in TERMINAL_SIGNALS else EXIT_SAVED)
        self.signal, self.step, self.path = signal.Signals(number), step, path


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `InterruptedBySignal`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context that delays the effect of Ctrl-C, SIGTERM and SIGHUP until the context ends."""
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
    """Context in which `handler` handles the signals that the process does not ignore.

    Outside the main thread, the context changes nothing, because Python handles no signals there.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n in numbers if is_main and signal.getsignal(n) not in (None, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number in previous:
            signal.signal(number, previous[number])


def print_error(text: str) -> None:
    """Print to stderr. Do nothing if the terminal has been closed."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _after_fork() -> None:
    """Block the recorded signals in a forked process, which a SIGTERM from its parent still ends.

    A thread waits for this SIGTERM, because a blocked signal does not call a handler.
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
