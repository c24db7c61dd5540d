import pytest
from support.commands import call
from support.tiny_run import tiny_config, write_config

from lit_diffusion.cli.trainer_settings import wrong_settings


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("trainer.accumulate_grad_batches=0", "must be at least 1, got 0"),
        ("trainer.check_val_every_n_epoch=0", "must be at least 1, got 0"),
        ("trainer.val_check_interval=0", "must be at least 1 where it counts batches, got 0"),
        ("ckpt_path=best", "best-fid.ckpt"),
    ],
)
def test_what_lightning_would_fail_on_later_is_refused(option, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())
    assert call(f"fit --config tiny.yaml --trust support --{option}") == 2
    name = option.partition("=")[0]
    assert f"lit-diffusion fit: {name}" in (said := capsys.readouterr().err)
    assert told in said
    assert "Traceback" not in said


def test_usual_settings_are_not():
    usual = {
        "accumulate_grad_batches": 4,
        "check_val_every_n_epoch": None,
        "val_check_interval": 0.25,
        "max_steps": -1,
    }
    assert list(wrong_settings(usual)) == []
    assert list(wrong_settings(usual | {"val_check_interval": "00:01:00:00"})) == []
    assert [list(wrong_settings({}, path)) for path in ("last", None, "a.ckpt")] == [[], [], []]


def test_no_number_of_steps_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config(max_steps=None))
    assert call("fit --config tiny.yaml --trust support") == 2
    assert "trainer.max_steps must be a number, -1 for no end" in capsys.readouterr().err
