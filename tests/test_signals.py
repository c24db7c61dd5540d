import multiprocessing
import os
import signal
import threading
import time

import pytest

from lit_diffusion.signals import SignalNotes, outlive_signals


def lives(process):
    process.join(0.5)
    return process.exitcode is None


def child(initialise=lambda: None):
    """A process that waits, and tells when it began to."""
    ready = multiprocessing.get_context("fork").Event()

    def wait():
        initialise()
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


def test_processes_forked_at_other_times_are_ended_by_signals():
    process = child()
    signal_from_elsewhere(process, signal.SIGTERM)
    assert not lives(process)


def test_a_worker_may_ask_for_the_same_by_itself():
    process = child(outlive_signals)
    signal_from_elsewhere(process, signal.SIGTERM)
    assert lives(process)
    process.terminate()
    assert not lives(process)


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
    assert "main thread" in caught[0]
