"""Completion: candidates, and what the shells make of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import SCRIPT, call

from lit_diffusion.cli.completion import SCRIPTS, SUBCOMMANDS, complete
from lit_diffusion.cli.convert import build_parser as build_converter
from lit_diffusion.cli.main import COMMANDS
from lit_diffusion.lab.analysis.command import DESCRIPTIONS

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fet", ["fetch-weights"]),
        ("convert ", ["--help", "export", "import"]),
        ("sample --comp", ["--compare", "--compare_steps"]),
        ("convert export --format ", ["diffusers", "safetensors"]),
        ("convert export --format=s", ["safetensors"]),
        ("completion z", ["zsh"]),
        ("analyze hessian --k", ["--kinks"]),
        ("fit --ckpt", ["--ckpt_path"]),
        ("fit --trainer.max_st", ["--trainer.max_steps="]),
        (f"fit --config={DIGITS} --model.net", ["--model.network."]),
        (f"sweep {DIGITS} --model.network.drop", []),
        (f"doctor {DIGITS} --model.network.num_h", ["--model.network.num_heads="]),
        (f"fit -c {DIGITS} --trainer.callbacks.EMA", ["--trainer.callbacks.EMA."]),
        (f"fit -c {DIGITS} --trainer.callbacks.EMA.", ["--trainer.callbacks.EMA.decays="]),
        ("fit --config nowhere.yaml --model.", []),
        ("fit --config digi", []),  # files, which the shell completes
        ("nothing --", []),
    ],
)
def test_candidates(line, expected):
    assert complete(f"lit-diffusion {line}") == expected


@pytest.mark.parametrize("line", ["", "lit-diffusion"])
def test_a_line_without_an_argument_has_no_candidates(line):
    assert complete(line) == []


def test_settings_of_an_unusual_config_are_completed(tmp_path):
    config = tmp_path / "odd.yaml"
    ema = "{class_path: EMA, init_args: {decays: [0.9]}}"
    config.write_text(f"trainer: {{callbacks: [EMA, {{a: 1}}, {{class_path: 3}}, 5, {ema}], 7: 1}}")
    line = f"lit-diffusion fit -c {config} --trainer."
    assert "--trainer.7=" in complete(line)
    assert "--trainer.callbacks." in complete(line)


def test_every_command_can_be_completed():
    assert set(COMMANDS) <= set(complete("lit-diffusion "))
    for name in COMMANDS:
        subcommand = SUBCOMMANDS.get(name, [""])[0]
        assert "--help" in complete(f"lit-diffusion {name} {subcommand} --"), name
    assert set(SUBCOMMANDS["analyze"]) == set(DESCRIPTIONS)
    assert all(build_converter(name).prog.endswith(name) for name in SUBCOMMANDS["convert"])


def test_no_torch_is_imported_at_a_tab():
    script = f"""if True:
        import sys
        from lit_diffusion.cli.main import main
        main(["completion", "--line", "lit-diffusion fit -c {DIGITS} --model."])
        assert not {{"torch", "lightning", "jsonargparse"}} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--model.network." in done.stdout


def test_a_shell_is_needed(capsys):
    assert call("completion") == 2
    assert "needs a shell: bash, zsh, fish." in capsys.readouterr().err


PRINT = {
    "bash": """COMP_LINE="$LINE" COMP_POINT=${#LINE} COMPREPLY=(); _lit_diffusion 2>/dev/null
        printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """compset() { }; compadd() { print -l -- ${@:#-*} ${(M)@:#--?*} }
        words=(${(z)LINE}) CURRENT=$#words PREFIX=$words[-1]  # of one command of the line
        LBUFFER="cd . && $LINE"; _lit_diffusion""",
    "fish": "complete --do-complete $LINE",
}
"""What prints the candidates for $LINE in a shell."""


@pytest.mark.system
@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        *(
            (shell, f"fit --config {DIGITS} --trainer.max_s", "--trainer.max_steps=")
            for shell in SCRIPTS
        ),
        ("fish", "convert export --format=sa", "--format=safetensors"),
    ],
)
def test_scripts_work_in_their_shell(shell, words, expected):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = f"lit-diffusion {words}"
    path = f"{Path(SCRIPT).parent}:{os.environ['PATH']}"
    script = SCRIPTS[shell].replace("compdef _lit_diffusion lit-diffusion", "")
    done = subprocess.run(
        [shell, "-c", f"{script}\n{PRINT[shell]}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "LINE": line},
    )
    assert done.stdout.split() == [expected], done.stderr
