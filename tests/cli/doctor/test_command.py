"""The command itself: what it takes and prints."""

from pathlib import Path

import pytest
from support.commands import call

from lit_diffusion.cli.doctor import command as doctor
from lit_diffusion.cli.doctor.command import as_options_of_fit
from lit_diffusion.cli.doctor.report import ok, problem, warning

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
        monkeypatch.setattr(doctor, "supervised", lambda options: iter(findings))

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
