"""Processes side by side, with small ones of Python's."""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_diffusion.lab.compare import processes
from lit_diffusion.lab.compare.processes import Job, claim_log, run_jobs

pytestmark = pytest.mark.usefixtures("folder", "terminal_signals")
TOUCH = "open({!r}, 'w').close()\n"
WAIT = """
import os, time
for _ in range(1000):
    if os.path.exists({!r}): break
    time.sleep(0.01)
else: raise SystemExit(1)
"""


@pytest.fixture(autouse=True)
def _processes_are_asked_often(monkeypatch):
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: time.sleep(s / 10))
    monkeypatch.setattr(processes, "time", clock)


def job(code: str, name: str = "a") -> Job:
    return Job(name, [sys.executable, "-c", code], claim_log(Path(f"{name}.log")))


def ended(work, at_once: int = 1) -> list[tuple[str, int]]:
    ends = []
    run_jobs(work, at_once, lambda job, code, _: ends.append((job.name, code)))
    return ends


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interrupt(number: signal.Signals, when: str) -> None:
    """Send a signal to this process once a file is there, and then write a file "sent"."""

    def send():
        wait_for(Path(when).exists)
        os.kill(os.getpid(), number)
        Path("sent").touch()

    threading.Thread(target=send).start()


def test_each_process_is_reported_with_its_exit_code_and_the_others_go_on():
    Path("a.log").write_text("before\n")
    codes = {
        "a": "import sys; print('out'); sys.exit(3)",
        "b": "pass",
        "c": "raise ValueError('no')",
    }
    assert ended(job(code, name) for name, code in codes.items()) == [("a", 3), ("b", 0), ("c", 1)]
    assert Path("a.log").read_text().split() == ["before", "out"]
    assert "ValueError: no" in Path("c.log").read_text()


def test_as_many_run_at_a_time_as_asked_and_the_next_is_asked_for_when_there_is_room():
    """Each one of two ends only if the other runs, too; None is no end, and holds up nothing."""
    started, ends = [], []

    def work():
        for name, other in ("ab", "ba", "cd", "dc"):
            while name == "c" and len(ends) < 2:
                yield None
            yield None  # also when nothing runs
            assert len(started) - len(ends) < 2
            started.append(name)
            yield job(TOUCH.format(name) + WAIT.format(other), name)

    run_jobs(work(), 2, lambda job, code, _: ends.append((job.name, code)))
    assert sorted(ends) == [(name, 0) for name in "abcd"]


def test_a_file_system_without_locks_is_no_obstacle(monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(processes.fcntl, "flock", flock)
    assert ended([job("print('out')")]) == [("a", 0)]
    assert Path("a.log").read_text() == "out\n"


def test_cores_are_shared_out_where_threads_are_not_set(monkeypatch):
    code = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [ended([job(code)], at_once=n) for n in (3, 9)] == [[("a", 2)], [("a", 1)]]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert ended([job(code)]) == [("a", 7)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_the_processes_and_starts_no_other(number):
    code = (
        "import signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, frame: sys.exit(number))\n"
        f"{TOUCH.format('there')}time.sleep(60)"
    )
    interrupt(number, "there")
    ends, work = [], [job(code, "a"), job(TOUCH.format("other"), "b")]
    with pytest.raises(KeyboardInterrupt) as raised:
        run_jobs(work, 1, lambda job, code, _: ends.append((job.name, code)))
    assert ends == [("a", number if number == signal.SIGUSR1 else signal.SIGTERM)]
    assert not Path("other").exists()
    assert getattr(raised.value, "signal", signal.SIGINT) == number


def test_a_process_that_does_not_stop_is_killed_with_its_children(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.05)
    child = "import signal, time, os; signal.signal(15, signal.SIG_IGN)\n"
    write = "open('tmp', 'w').write(str(os.getpid())); os.rename('tmp', 'pid'); time.sleep(60)"
    code = child + (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child + write!r}])\ntime.sleep(60)"
    )
    interrupt(signal.SIGINT, "pid")
    with pytest.raises(KeyboardInterrupt):
        ended([job(code)])
    status = Path(f"/proc/{Path('pid').read_text()}/status")
    wait_for(lambda: not status.exists() or "zombie" in status.read_text())
