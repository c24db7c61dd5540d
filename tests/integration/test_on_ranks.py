"""What tests on ranks show when the ranks hang."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from support.on_ranks import run_on_ranks


@pytest.mark.slow
def test_ranks_and_workers_that_hang_write_their_stacks_and_end(tmp_path, monkeypatch, capfd):
    def out_of_time(process, timeout):
        while len(list(tmp_path.glob("worker*"))) < 2:
            time.sleep(0.1)
        monkeypatch.undo()
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", out_of_time)
    with pytest.raises(subprocess.TimeoutExpired):
        run_on_ranks("hanging_ranks.py", tmp_path)
    said = capfd.readouterr().err
    assert len(re.findall(r'hanging_ranks\.py", line \d+ in __getitem__', said)) == 2
    assert len(re.findall(r"in _try_get_data", said)) == 2
    pids = [int(re.sub(r"\D", "", file.name)) for file in tmp_path.glob("*[0-9]")]
    assert len(pids) == 4
    assert [pid for pid in pids if _runs(pid)] == []


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
