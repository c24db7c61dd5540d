"""The command: arguments, exit codes, output, and what needs no config."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import call

from lit_diffusion.cli.doctor import checks
from lit_diffusion.cli.doctor.checks import Finding, Level, check_ranks, report

DIGITS = str(Path(__file__).parents[3] / "configs" / "digits.yaml")
NARROW = "--model.init_args.network.init_args.model_channels=8"


def test_digits_yaml(capfd):
    options = f"{NARROW} --trainer.max_steps=600 --data.init_args.batch_size=8"
    assert call(f"doctor {DIGITS} {options}") == 0
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert all(line.split()[0] in ("note", "OK") for line in lines[:-2])
    assert any("600 optimizer steps of 8 images" in line for line in lines)
    assert any("measured on" in line for line in lines)
    assert lines[-1] == "0 problem(s), 0 warning(s)"
    assert printed.err == ""
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("nowhere.yaml", 2, "File does not exist"),
        (f"--config {DIGITS} --trainer.max_stepz=40", 2, "Did you mean 'trainer.max_steps'?"),
        ("--help", 0, "lit-diffusion doctor configs/digits.yaml"),
        ("", 2, "needs --config FILE"),
    ],
)
def test_exit_codes(options, code, text, capsys):
    assert call(f"doctor {options}") == code
    assert text in capsys.readouterr().out


def test_only_problems_fail(monkeypatch, capsys):
    monkeypatch.setattr(checks, "examine", lambda _: [Finding(Level.WARNING, "a", "odd")])
    assert call("doctor") == 0
    monkeypatch.setattr(checks, "examine", lambda _: [Finding(Level.PROBLEM, "a", "bad")])
    assert call("doctor") == 2
    monkeypatch.setenv("SLURM_PROCID", "1")
    capsys.readouterr()
    assert call("doctor") == 0
    assert capsys.readouterr().out == ""  # one process of several reports


def test_the_most_serious_comes_first_in_one_line():
    levels = (Level.OK, Level.NOTE, Level.PROBLEM, Level.WARNING)
    findings = [Finding(level, "topic", "3\n  4\n") for level in levels]
    lines = [line.split() for line in report(findings).splitlines()]
    assert lines[0] == ["problem", "topic", "3", "4"]
    assert [line[0] for line in lines[1:4]] == ["warning", "note", "OK"]
    assert lines[5][:4] == ["1", "problem(s),", "1", "warning(s):"]


# Ranks

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("ranks", "changes", "level", "text"),
    [
        ((4, 2), {}, Level.OK, "8 task(s)"),
        ((4, 1), {}, Level.PROBLEM, "--nodes=1"),
        ((4, 2), {"SLURM_NTASKS": "7"}, Level.PROBLEM, "waits for 8"),
        ((4, 2), {"SLURM_JOB_NAME": "bash"}, Level.PROBLEM, "--job-name"),
        ((4, 2), {"SLURM_NTASKS": None}, Level.PROBLEM, "one node"),
        ((4, 1), {"SLURM_NTASKS": "2(x3)"}, Level.NOTE, "one node"),
        ((4, 1), {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, Level.NOTE, "one node"),
        ((4, 1), {"SLURM_JOB_ID": None}, None, None),
    ],
)
def test_a_launcher_must_start_as_many_processes_as_the_run_has_ranks(
    monkeypatch, ranks, changes, level, text
):
    for name, value in {**JOB, **changes}.items():
        if value is not None:  # else it is not set
            monkeypatch.setenv(name, value)
    (devices, nodes), strategy = ranks, SimpleNamespace(root_device=torch.device("meta"))
    run = SimpleNamespace(
        cli=SimpleNamespace(num_devices=devices, num_nodes=nodes),
        ranks=devices * nodes,
        trainer=SimpleNamespace(strategy=strategy),
    )
    findings = list(check_ranks(run))
    assert len(findings) == (level is not None)
    for finding in findings:
        assert finding.level is level
        assert text in finding.text
