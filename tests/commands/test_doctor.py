"""The command itself: what it takes and prints, and what is told of an examination that dies."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.commands import call

from lit_diffusion.commands import doctor
from lit_diffusion.commands.doctor import as_options_of_fit, supervised
from lit_diffusion.doctor.report import Level, ok, problem, warning

DIGITS = str(Path(__file__).parent.parent.parent / "configs" / "digits.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def finds(monkeypatch):
    """Findings in place of an examination."""

    def register(*findings):
        monkeypatch.setattr(doctor, "supervised", lambda options, patience: iter(findings))

    return register


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], []),
        (["a.yaml"], ["--config", "a.yaml"]),
        (["a.yaml", "b.yaml"], ["--config", "a.yaml", "--config", "b.yaml"]),
        (["--config", "a.yaml"], ["--config", "a.yaml"]),
        (["-c", "a.yaml", "b.yaml"], ["-c", "a.yaml", "--config", "b.yaml"]),
        (["--config=a.yaml", "b.yaml"], ["--config=a.yaml", "--config", "b.yaml"]),
        (
            ["a.yaml", "--trainer.max_steps", "3"],
            ["--config", "a.yaml", "--trainer.max_steps", "3"],
        ),
        (["--trainer.max_steps=3", "a.yaml"], ["--trainer.max_steps=3", "--config", "a.yaml"]),
        (["--trainer.max_epochs", "-1"], ["--trainer.max_epochs", "-1"]),
        (
            ["--trainer.max_epochs", "-1", "a.yaml"],
            ["--trainer.max_epochs", "-1", "--config", "a.yaml"],
        ),
    ],
)
def test_bare_names_are_configs_and_all_else_is_for_fit(arguments, options):
    assert as_options_of_fit(arguments) == options


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "fine")], 0),
        ([ok("a", "fine"), warning("b", "odd")], 0),
        ([problem("c", "bad"), warning("b", "odd")], 2),
    ],
)
def test_only_problems_fail(finds, capsys, findings, code):
    finds(*findings)
    assert call("doctor") == code
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == len(findings) + 2  # an empty line and the verdict


def test_one_of_several_ranks_speaks(finds, capsys, monkeypatch):
    finds(problem("c", "bad"))
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert call("doctor") == 0
    assert capsys.readouterr().out == ""


def test_the_machine_is_examined_without_a_config(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    topics = [finding.topic for finding in doctor.examine([])]
    assert topics[:1] == ["versions"]
    assert topics[-1] == "SLURM"


def test_of_the_machine_a_run_hears_what_is_wrong_only(monkeypatch):
    monkeypatch.setattr("lit_diffusion.doctor.machine.LITTLE", 1e30)
    found = list(doctor.examine(["--config", "nowhere.yaml"]))
    assert [finding.topic for finding in found] == ["disk", "config"]


# The process that examines


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
        monkeypatch.setattr(doctor, "_examine_there", function)
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


# As it is called


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (f"{DIGITS} --trainer.max_steps=600", 0, "600 optimizer steps"),
        (f"--config {DIGITS} --trainer.max_stepz=40", 2, "Did you mean 'trainer.max_steps'?"),
        (f"{DIGITS} --print_config", 0, "class_path: lit_diffusion.callbacks.FIDEvaluation"),
    ],
)
def test_a_real_examination(options, code, told, capfd):
    assert call(f"doctor {options}") == code
    printed = capfd.readouterr()
    assert told in printed.out
    assert printed.err == ""
    assert list(Path().iterdir()) == []
