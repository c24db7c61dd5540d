"""What is told of an examination that dies, hangs or leaves."""

import multiprocessing
import os
import signal
import sys
import time

import pytest

from lit_diffusion.cli.doctor import supervised as room
from lit_diffusion.cli.doctor.report import Level, ok
from lit_diffusion.cli.doctor.supervised import supervised


def _dies(options, connection, errors):
    connection.send(ok("data", "here"))
    errors.write_text("one line\nthe last line\n")
    os.kill(os.getpid(), int(options[0]))


def _fails(options, connection, errors):
    errors.write_text("Traceback\nKeyError: 'x'\n")
    sys.exit(1)


def _hangs(options, connection, errors):
    connection.send(ok("data", "here"))
    time.sleep(1000)


def _leaves(options, connection, errors):
    connection.send(int(options[0]))


@pytest.fixture
def there(monkeypatch):
    """Another function in the process that examines; forked, which needs no imports."""

    def register(function):
        monkeypatch.setattr(room, "_examine_there", function)
        fork = multiprocessing.get_context("fork")
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)

    return register


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGILL, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (signal.SIGKILL, "died of SIGKILL, as the run may (the last line)"),
    ],
)
def test_what_was_found_before_a_death_is_told_with_its_cause(there, number, told):
    there(_dies)
    first, last = supervised([str(int(number))], 60.0)
    assert first == ok("data", "here")
    assert last.level is Level.PROBLEM
    assert told in last.text


def test_a_failure_of_ours_is_told_as_such(there):
    there(_fails)
    (finding,) = supervised([], 60.0)
    assert "the examination failed (KeyError: 'x')" in finding.text


def test_what_hangs_is_given_up_and_ended(there):
    there(_hangs)
    before = set(multiprocessing.active_children())
    first, last = supervised([], 1.0)
    assert first.topic == "data"
    assert "nothing came for 1 s after 'data'" in last.text
    assert set(multiprocessing.active_children()) == before


def test_a_way_out_of_the_parser_is_one_of_the_command(there):
    there(_leaves)
    with pytest.raises(SystemExit) as end:
        list(supervised(["0"], 60.0))
    assert end.value.code == 0
