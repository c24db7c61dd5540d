import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_digits, write_small_digits

from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.checkpoints.snapshots import write_snapshot

RUN = "evaluate --checkpoint run --extractor digits-cnn --reference real --num 24 --steps 2"


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    """With averages of widths 0.05 and 0.1, which are far apart, and snapshots of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_digits("real", "val", 40)
    file = Path("run/checkpoints/last.ckpt")
    write_small_digits(file)
    content = torch.load(file, weights_only=True)
    state = content["callbacks"].pop("EMA{'prefix': ''}")
    narrow = state["shadows"][0]
    wide = {name: 0.7 * value for name, value in narrow.items()}
    widths = {"decays": [0.05, 0.1], "shadows": [narrow, wide]}
    content["callbacks"]["PowerEMA{'prefix': ''}"] = state | widths
    write_checkpoint(content, file)
    for step in (3, 6, 9):
        write_snapshot(Path("run/ema-snapshots"), step, {0.05: narrow, 0.1: wide})


def scored(options, capsys):
    assert call(f"{RUN} {options}") == 0
    return json.loads(capsys.readouterr().out)


def test_each_width_is_scored_as_if_alone_and_the_best_is_named(capsys):
    found = scored("--ema 0.1,0.05,0.07", capsys)
    assert list(found["widths"]) == ["0.05", "0.07", "0.1"]
    fids = {width: record["fid"] for width, record in found["widths"].items()}
    assert len(set(fids.values())) == 3
    assert str(found["best"]) == min(fids, key=lambda width: fids[width])
    for width in ("0.05", "0.07"):
        alone = scored(f"--weights power_{width}", capsys)
        assert alone["fid"] == fids[width]
        assert found["widths"][width]["samples"]["weights"] == f"power_{width}"
    assert Image.open(found["figure"]).size[0] > 400


def test_what_goes_with_one_average_alone_is_refused(capsys):
    assert call(f"{RUN} --ema 0.05 --out made") == 2
    assert "leave out --images and --out" in capsys.readouterr().err
    assert call(f"{RUN} --ema wide") == 2
    assert "must be numbers such as 0.05,0.1, got 'wide'" in capsys.readouterr().err
