import pytest
from support.commands import call

KINDS = ("consistency", "interpolate", "landscape", "hessian")


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_help_says_what_to_type(kind, capsys):
    assert call(f"analyze {kind} --help") == 0
    told = capsys.readouterr().out
    if kind:
        assert "--out DIR" in told
        assert "--weights" in told
    else:
        assert all(f"lit-diffusion analyze {each} runs/a" in told for each in KINDS)


@pytest.mark.parametrize("given", ["", "spectrum runs/a --out out"])
def test_what_to_do_is_asked_for(given, capsys):
    assert call(f"analyze {given}") == 2
    assert "say consistency, interpolate, landscape, hessian first" in capsys.readouterr().err
