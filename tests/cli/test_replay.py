import re

import pytest
from support.commands import call
from support.failing_step import FILE, failed
from support.tiny_run import tiny_config, write_config

from lit_diffusion.checkpoints.saving import write_checkpoint


def test_a_run_from_a_config_is_replayed_from_its_file_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())
    fit = "fit --config tiny.yaml --trust support --model.init_args.shift=.nan"
    assert call(fit) == 1
    assert f"`lit-diffusion replay runs/tiny/{FILE}`" in capsys.readouterr().err
    assert call(f"replay runs/tiny/{FILE}") == 2
    assert "--trust support" in capsys.readouterr().err
    assert call(f"replay runs/tiny/{FILE} --trust support") == 0
    printed = capsys.readouterr().out
    assert "first gradient that is not finite: what follows network (TinyNet)" in printed
    assert printed.rstrip().endswith("to the last bit.")


def test_a_file_of_a_module_made_in_python_says_so(tmp_path, capsys):
    assert call(f"replay {failed(tmp_path)}") == 2
    assert "build it and call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "is a checkpoint and no step"),
        ([], "is a checkpoint and no step"),
        ({"updates": 2}, "had made 2 updates"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, capsys, kept, message):
    file = tmp_path / "file.ckpt"
    write_checkpoint({"state_dict": {}, **({} if kept is None else {"replay": kept})}, file)
    assert call(f"replay {file}") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("replay", "FILE must be given"),
        ("replay nowhere.ckpt", "There is no checkpoint at nowhere.ckpt"),
        (f"replay {__file__}", "truncated, damaged or no checkpoint|may hold pickled"),
    ],
)
def test_mistakes_are_told(capsys, command, message):
    assert call(command) == 2
    assert re.search(message, capsys.readouterr().err)
