"""Signals that a batch system sends: noted, and acted on when the program is ready for it.

A batch system signals all processes of a job. A handler that saved would do so in the middle of an
update, or of a collective that other ranks are not in; so it only makes a note.
"""

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

SAVED = 75
"""Exit code of a process that saved and is to be started again: EX_TEMPFAIL of sysexits.h."""

_active: "SignalNotes | None" = None


class SignalNotes:
    """Notes signals in place of being ended by them, from `start` to `stop`.

    Processes that are forked meanwhile, such as those that load data, take no notice of these
    signals; they would die of them, and the run with them.

    Args:
        signals: to note.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.received: signal.Signals | None = None
        self.signals = frozenset(signals)
        self._before: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Begin.

        Raises:
            ValueError: in a thread other than the main one, where Python handles no signals.
        """
        global _active
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be handled where the Trainer runs in the main thread; call fit "
                "there, or leave SaveOnSignal out."
            )
        self.received, _active = None, self
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Handle the signals as before."""
        global _active
        _active = None
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


class SavedOnSignal(SystemExit):
    """Ends a process that saved because of a signal, with exit code 75.

    Args:
        number: of the signal.
        step: optimizer steps done.
        path: of the checkpoint.
    """

    def __init__(self, number: int, step: int, path: Path) -> None:
        super().__init__(SAVED)
        self.signal, self.step, self.path = signal.Signals(number), step, path


def outlive_signals(worker: int = 0) -> None:
    """Have this process ended by its parent alone, not by signals to all processes of a job.

    A `worker_init_fn` for DataLoaders. One is not needed where workers are forked during a fit with
    SaveOnSignal, as they are on Linux before Python 3.14.

    Args:
        worker: number of a DataLoader's worker, without meaning here.
    """
    _ignore({signal.SIGTERM, signal.SIGUSR1})


def _ignore(signals: set[signal.Signals]) -> None:
    """Block signals, and wait in a thread for a SIGTERM of the parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    arguments = (signals, os.getppid())
    threading.Thread(target=_end_with_parent, args=arguments, daemon=True).start()


def _end_with_parent(signals: set[signal.Signals], parent: int) -> None:
    while True:
        came = signal.sigwaitinfo(signals)
        if came.si_pid == parent and came.si_signo == signal.SIGTERM:
            os._exit(0)


def _after_fork() -> None:
    if _active is not None:
        _ignore(set(_active.signals))


os.register_at_fork(after_in_child=_after_fork)
