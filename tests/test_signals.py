import multiprocessing
import os
import signal
import threading
import time

import pytest

from lit_diffusion import signals
from lit_diffusion.signals import (
    SAVED,
    SignalNotes,
    heed,
    noting,
    stoppable,
    uninterrupted,
)


def lives(process):
    process.join(0.5)
    return process.exitcode is None


def child():
    """A process that waits, and tells when it began to."""
    ready = multiprocessing.get_context("fork").Event()

    def wait():
        ready.set()
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=wait, daemon=True)
    process.start()
    assert ready.wait(10)
    return process


def signal_from_elsewhere(process, number):
    """As a batch system does: not the parent."""
    assert os.system(f"kill -{int(number)} {process.pid}") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_noted_and_nothing_else_happens(number):
    notes = SignalNotes([signal.SIGTERM, signal.SIGUSR1])
    before = signal.getsignal(number)
    notes.start()
    try:
        assert notes.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        notes.stop()
    assert notes.received == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_processes_forked_meanwhile_are_ended_by_their_parent_alone(number):
    notes = SignalNotes([signal.SIGTERM, signal.SIGUSR1])
    notes.start()
    process = child()
    notes.stop()
    signal_from_elsewhere(process, number)
    assert lives(process)
    process.terminate()
    assert not lives(process)


def test_processes_forked_meanwhile_end_when_they_are_done():
    notes = SignalNotes([signal.SIGTERM])
    notes.start()
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    notes.stop()
    process.join(10)
    assert process.exitcode == 0


def test_processes_forked_at_other_times_are_ended_by_signals():
    process = child()
    signal_from_elsewhere(process, signal.SIGTERM)
    assert not lives(process)


def test_what_was_noted_before_a_fit_is_taken_over_by_it():
    before = signal.getsignal(signal.SIGTERM)
    with noting():
        os.kill(os.getpid(), signal.SIGTERM)
        notes = SignalNotes([signal.SIGTERM])
        notes.start()
        assert notes.received == signal.SIGTERM
        notes.stop()
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_was_noted_comes_again_where_nothing_will_be_saved():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *args: came.append(args))
    try:
        with noting():
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
            heed()
            assert len(came) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_a_save_another_signal_does_not_change_the_exit_code():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit), noting():
            raise SystemExit(SAVED)
        os.kill(os.getpid(), signal.SIGTERM)
        later = SignalNotes([signal.SIGTERM])
        later.start()
        assert later.received is None
        later.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [SystemExit(1), SystemExit("75"), ValueError("75")], ids=repr)
def test_after_another_end_signals_are_handled_as_before(error):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(type(error)), noting():
        raise error
    assert signal.getsignal(signal.SIGTERM) == before


def test_where_nothing_was_noted_nothing_comes():
    heed()
    before = signal.getsignal(signal.SIGTERM)
    with noting():
        heed()
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_ends_what_waits_and_the_first_is_answered(capfd, monkeypatch):
    notes = SignalNotes([signal.SIGINT, signal.SIGTERM])
    notes.answer = "it waits"
    notes.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):  # as terminal and torchrun do at one Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "it waits"
        monkeypatch.setattr(signals, "ECHO", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        notes.stop()
    assert notes.received == signal.SIGTERM


@pytest.mark.usefixtures("terminal_signals")
def test_what_is_ignored_stays_so_unless_it_was_silenced_after_a_save():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    notes, received = SignalNotes([signal.SIGHUP, signal.SIGUSR1]), []
    before = signal.getsignal(signal.SIGUSR1)
    for _ in range(2):
        notes.start()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        received.append(notes.received)
        notes.ignore()
    signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1] * 2


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_what_must_not_be_interrupted(number):
    reached = []
    with pytest.raises(KeyboardInterrupt) as ended, stoppable():  # noqa: PT012
        with uninterrupted():
            os.kill(os.getpid(), number)
            reached.append("end")
        reached.append("behind")
    assert reached == ["end"]
    assert getattr(ended.value, "signal", signal.SIGINT) == number


def test_a_second_start_keeps_the_way_back():
    before = signal.getsignal(signal.SIGTERM)
    notes = SignalNotes([signal.SIGTERM])
    notes.start()
    notes.start()
    notes.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_thread_is_refused():
    caught = []

    def start():
        try:
            SignalNotes([signal.SIGTERM]).start()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "leave SaveOnSignal out" in caught[0]
