"""Processes side by side, with small ones of Python's."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lit_diffusion.lab.compare import processes
from lit_diffusion.lab.compare.processes import Job, claim_log, run_jobs
from lit_diffusion.signals import InterruptedBySignal

pytestmark = pytest.mark.usefixtures("terminal_signals")


def job(folder: Path, code: str, name: str = "a") -> Job:
    return Job(name, [sys.executable, "-c", code], claim_log(folder / f"{name}.log"))


def ended(work, at_once: int = 1) -> list[tuple[str, int]]:
    ends = []
    run_jobs(work, at_once, lambda job, code, _: ends.append((job.name, code)))
    return ends


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt(number: signal.Signals, when: Path) -> None:
    """Send a signal to this process once a file is there."""

    def send():
        wait_for(when)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def test_each_process_is_reported_with_its_exit_code_and_the_others_go_on(tmp_path):
    (tmp_path / "a.log").write_text("before\n")
    codes = {
        "a": "import sys; print('out'); sys.exit(3)",
        "b": "pass",
        "c": "raise ValueError('no')",
    }
    ends = ended(job(tmp_path, code, name) for name, code in codes.items())
    assert ends == [("a", 3), ("b", 0), ("c", 1)]
    assert (tmp_path / "a.log").read_text().split() == ["before", "out"]
    assert "ValueError: no" in (tmp_path / "c.log").read_text()


def test_as_many_run_at_a_time_as_asked_and_no_more(tmp_path):
    """Each one ends when it sees the other, and fails when it sees a third."""
    code = (
        "import os, sys, time; file = sys.argv[1]; open(file, 'w').close(); most = 0\n"
        "for _ in range(1000):\n"
        "    most = max(most, sum(f.startswith('run') for f in os.listdir('.')))\n"
        "    if most == 2: break\n"
        "    time.sleep(0.01)\n"
        "time.sleep(0.3); most = max(most, sum(f.startswith('run') for f in os.listdir('.')))\n"
        "os.remove(file); sys.exit(most)"
    )
    work = [job(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{code}", n) for n in "abcd"]
    work = [Job(j.name, [*j.command, f"run-{j.name}"], j.log) for j in work]
    assert sorted(ended(work, at_once=2)) == [("a", 2), ("b", 2), ("c", 2), ("d", 2)]


def test_the_next_job_is_asked_for_when_there_is_room_for_it(tmp_path):
    done = tmp_path / "done"

    def work():
        yield job(tmp_path, f"open({str(done)!r}, 'w').close()", "a")
        assert done.exists()
        yield job(tmp_path, "pass", "b")

    assert ended(work()) == [("a", 0), ("b", 0)]


def test_none_is_no_end_and_holds_up_nothing(tmp_path):
    """As long as the second has nothing to start, the first is told of when it ends."""
    ends = []

    def work():
        yield job(tmp_path, "pass", "a")
        while not ends:
            yield None
        yield None  # when nothing runs
        yield job(tmp_path, "pass", "b")

    run_jobs(work(), 2, lambda job, *_: ends.append(job.name))
    assert ends == ["a", "b"]


def test_cores_are_shared_out_where_threads_are_not_set(tmp_path, monkeypatch):
    code = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [ended([job(tmp_path, code)], at_once=n) for n in (1, 3, 9)]
    assert threads == [[("a", n)] for n in (8, 2, 1)]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert ended([job(tmp_path, code)]) == [("a", 7)]


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
    ],
)
def test_a_signal_stops_the_processes_and_starts_no_other(tmp_path, number, passed_on):
    there, other = tmp_path / "there", tmp_path / "other"
    code = (
        "import signal, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, frame: sys.exit(number))\n"
        f"open({str(there)!r}, 'w').close(); time.sleep(60)"
    )
    work = [job(tmp_path, code, "a"), job(tmp_path, f"open({str(other)!r}, 'w')", "b")]
    interrupt(number, there)
    ends = []
    with pytest.raises(KeyboardInterrupt) as raised:
        run_jobs(work, 1, lambda job, code, _: ends.append((job.name, code)))
    assert ends == [("a", passed_on)]
    assert not other.exists()
    assert getattr(raised.value, "signal", signal.SIGINT) == number


def test_after_an_announcement_processes_have_the_time_that_they_need(tmp_path, monkeypatch):
    """The job that is being requeued gets a SIGTERM, too, while some still save."""
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    there, saving, done = (tmp_path / name for name in ("there", "saving", "done"))
    code = (
        "import pathlib, signal, time\n"
        "def save(*_):\n"
        f"    open({str(saving)!r}, 'w').close(); time.sleep(1)\n"
        f"    open({str(done)!r}, 'w').close(); raise SystemExit(75)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        f"open({str(there)!r}, 'w').close(); time.sleep(60)"
    )
    interrupt(signal.SIGUSR1, there)
    interrupt(signal.SIGTERM, saving)
    with pytest.raises(InterruptedBySignal):
        ended([job(tmp_path, code)])
    assert done.exists()


def test_a_process_that_does_not_stop_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    child = "import signal, sys, time, os; signal.signal(15, signal.SIG_IGN)\n"
    write = "open(sys.argv[1] + '.tmp', 'w').write(str(os.getpid())); "
    write += "os.rename(sys.argv[1] + '.tmp', sys.argv[1]); time.sleep(60)"
    code = child + (
        "import subprocess; "
        f"subprocess.Popen([sys.executable, '-c', {child + write!r}, {str(tmp_path / 'pid')!r}])\n"
        "time.sleep(60)"
    )
    interrupt(signal.SIGINT, tmp_path / "pid")
    with pytest.raises(KeyboardInterrupt):
        ended([job(tmp_path, code)])
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_signals_that_are_ignored_stay_so(tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt(signal.SIGHUP, tmp_path / "there")
        code = f"open({str(tmp_path / 'there')!r}, 'w').close(); import time; time.sleep(0.5)"
        assert ended([job(tmp_path, code)]) == [("a", 0)]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_log_is_claimed_once(tmp_path):
    first = claim_log(tmp_path / "deep" / "a.log")
    assert claim_log(tmp_path / "deep" / "a.log") is None
    first.close()
    assert claim_log(tmp_path / "deep" / "a.log") is not None


def test_the_claim_lives_as_long_as_the_process_though_its_parent_was_killed(tmp_path):
    log = tmp_path / "a.log"
    child = "import time, sys; print('there', flush=True); time.sleep(60)"
    code = (
        "import pathlib, sys\n"
        "from lit_diffusion.lab.compare.processes import Job, claim_log, run_jobs\n"
        f"log = claim_log(pathlib.Path({str(log)!r}))\n"
        f"run_jobs([Job('a', [sys.executable, '-c', {child!r}], log)], 1, print)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(log)
    while "there" not in log.read_text():
        assert parent.poll() is None
        time.sleep(0.02)
    (pid,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    assert claim_log(log) is None
    os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while claim_log(log) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
