import multiprocessing
import os
import signal
import threading
import time

import pytest

from lit_diffusion import signals
from lit_diffusion.signals import (
    EXIT_SAVED,
    SignalRecorder,
    defer_signals,
    raise_on_signals,
    record_signals,
    redeliver_signal,
)


def child():
    """A process that sleeps, forked from this one."""
    ready = multiprocessing.get_context("fork").Event()

    def wait():
        ready.set()
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=wait, daemon=True)
    process.start()
    assert ready.wait(10)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_recorded_and_nothing_else_happens(number):
    recorder = SignalRecorder([signal.SIGTERM, signal.SIGUSR1])
    before = signal.getsignal(number)
    recorder.start()
    try:
        assert recorder.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        recorder.stop()
    assert recorder.received == number
    assert signal.getsignal(number) == before


def test_processes_forked_meanwhile_are_ended_by_their_parent_alone():
    recorder = SignalRecorder([signal.SIGTERM, signal.SIGUSR1])
    recorder.start()
    process = child()
    recorder.stop()
    assert os.system(f"kill {process.pid}") == 0  # as a batch system does, which is no parent
    process.join(0.1)
    assert process.exitcode is None
    process.terminate()
    process.join(10)
    assert process.exitcode == 0


def test_processes_forked_meanwhile_end_when_they_are_done():
    recorder = SignalRecorder([signal.SIGTERM])
    recorder.start()
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    recorder.stop()
    process.join(10)
    assert process.exitcode == 0


def test_what_was_recorded_before_a_fit_is_taken_over_by_it():
    before = signal.getsignal(signal.SIGTERM)
    with record_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        recorder = SignalRecorder([signal.SIGTERM])
        recorder.start()
        assert recorder.received == signal.SIGTERM
        recorder.stop()
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_recorded_signal_is_sent_again_where_nothing_will_be_saved():
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *args: handled.append(args))
    try:
        with record_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert handled == []
            redeliver_signal()
            assert len(handled) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_a_save_another_signal_does_not_change_the_exit_code():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit), record_signals():
            raise SystemExit(EXIT_SAVED)
        os.kill(os.getpid(), signal.SIGTERM)
        later = SignalRecorder([signal.SIGTERM])
        later.start()
        assert later.received is None
        later.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [SystemExit(1), ValueError("75")], ids=repr)
def test_after_another_end_signals_are_handled_as_before(error):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(type(error)), record_signals():
        raise error
    assert signal.getsignal(signal.SIGTERM) == before


def test_where_nothing_was_recorded_nothing_is_sent():
    redeliver_signal()
    before = signal.getsignal(signal.SIGTERM)
    with record_signals():
        redeliver_signal()
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_ends_what_waits_and_the_first_is_answered(capfd, monkeypatch):
    recorder = SignalRecorder([signal.SIGINT, signal.SIGTERM])
    recorder.ctrl_c_message = "saving"
    recorder.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):  # as terminal and torchrun do at one Ctrl-C
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "saving"
        monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        recorder.stop()
    assert recorder.received == signal.SIGTERM


@pytest.mark.usefixtures("terminal_signals")
def test_what_is_ignored_stays_so_unless_it_was_silenced_after_a_save():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    recorder, received = SignalRecorder([signal.SIGHUP, signal.SIGUSR1]), []
    before = signal.getsignal(signal.SIGUSR1)
    for _ in range(2):
        recorder.start()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        received.append(recorder.received)
        recorder.ignore()
    signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1] * 2


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_deferred_signals_are_delivered_at_the_end(number):
    reached = []
    with pytest.raises(KeyboardInterrupt) as ended, raise_on_signals():  # noqa: PT012
        with defer_signals():
            os.kill(os.getpid(), number)
            reached.append("end")
        reached.append("after")
    assert reached == ["end"]
    assert getattr(ended.value, "signal", signal.SIGINT) == number


def test_a_second_start_keeps_the_way_back():
    before = signal.getsignal(signal.SIGTERM)
    recorder = SignalRecorder([signal.SIGTERM])
    recorder.start()
    recorder.start()
    recorder.stop()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_thread_is_refused():
    caught = []

    def start():
        try:
            SignalRecorder([signal.SIGTERM]).start()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "leave SaveOnSignal out" in caught[0]
