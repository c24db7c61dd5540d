"""Signals are recorded, deferred and delivered; that handlers are put back is checked for every
test, by conftest.py."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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


def send(number):
    os.kill(os.getpid(), number)


@contextmanager
def recording(*numbers):
    recorder = SignalRecorder(numbers)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


def test_the_first_signal_is_recorded_and_nothing_else_happens():
    with recording(signal.SIGTERM, signal.SIGUSR1) as recorder:
        assert recorder.received is None
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
    assert recorder.received == signal.SIGUSR1


def test_processes_forked_meanwhile_end_when_they_are_done_or_by_their_parent_alone():
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    with recording(signal.SIGTERM, signal.SIGUSR1):
        waiting = fork.Process(target=lambda: (ready.set(), time.sleep(60)), daemon=True)
        brief = fork.Process(target=os.getpid)
        for process in (waiting, brief):
            process.start()
        assert ready.wait(10)
    brief.join(10)
    assert brief.exitcode == 0
    assert os.system(f"kill {waiting.pid}") == 0  # as a batch system does, which is no parent
    waiting.join(0.1)
    assert waiting.exitcode is None
    waiting.terminate()
    waiting.join(10)
    assert waiting.exitcode == 0


def record_one():
    with recording(signal.SIGUSR1) as recorder:
        send(signal.SIGUSR1)
        os._exit(recorder.received == signal.SIGUSR1)


def test_a_forked_process_that_records_signals_itself_gets_them():
    with recording(signal.SIGUSR1) as outer:
        rank = multiprocessing.get_context("fork").Process(target=record_one)
        rank.start()
        rank.join(10)
    assert rank.exitcode == 1
    assert outer.received is None


def test_what_was_recorded_before_a_fit_is_taken_over_by_it():
    before = signal.getsignal(signal.SIGTERM)
    with record_signals():
        send(signal.SIGTERM)
        with recording(signal.SIGTERM) as recorder:
            assert recorder.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != before


def test_a_recorded_signal_is_sent_again_where_nothing_will_be_saved():
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *args: handled.append(args))
    try:
        redeliver_signal()
        with record_signals():
            redeliver_signal()
        with record_signals():
            send(signal.SIGTERM)
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
        send(signal.SIGTERM)
        with recording(signal.SIGTERM) as later:
            assert later.received is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [SystemExit(1), ValueError("75")], ids=repr)
def test_after_another_end_signals_are_handled_as_before(error):
    with pytest.raises(type(error)), record_signals():
        raise error


@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_ends_what_waits_and_the_first_is_answered(capfd, monkeypatch):
    with recording(signal.SIGINT, signal.SIGTERM) as recorder:
        recorder.ctrl_c_message = "saving"
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            send(number)  # terminal and torchrun both send SIGINT at one Ctrl-C
        assert capfd.readouterr().err == "saving"
        monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert recorder.received == signal.SIGTERM


@pytest.mark.usefixtures("terminal_signals")
def test_what_is_ignored_stays_so_unless_it_was_silenced_after_a_save():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    recorder, received = SignalRecorder([signal.SIGHUP, signal.SIGUSR1]), []
    before = signal.getsignal(signal.SIGUSR1)
    for _ in range(2):
        recorder.start()
        send(signal.SIGHUP)
        send(signal.SIGUSR1)
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
            send(number)
            reached.append("end")
        reached.append("after")
    assert reached == ["end"]
    assert getattr(ended.value, "signal", signal.SIGINT) == number


def test_a_thread_is_refused():
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="remove SaveOnSignal"):
        pool.submit(SignalRecorder([signal.SIGTERM]).start).result()
