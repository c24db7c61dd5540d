import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_digits, write_small_digits

from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.checkpoints.snapshots import write_snapshot
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.lab.compare.run_folders import read_run
from lit_diffusion.lab.compare.run_tables import fids_by_width

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
    folder, averages = Path("run/ema-snapshots"), {0.05: narrow, 0.1: wide}
    taken = {step: write_snapshot(folder, step, averages) for step in (3, 6, 9)}
    content["callbacks"]["PowerEMA{'prefix': ''}"] = state | widths | {"snapshots": taken}
    write_checkpoint(content, file)


def scored(options, capsys):
    assert call(f"{RUN} {options}") == 0
    return json.loads(capsys.readouterr().out)


def test_each_width_is_scored_as_if_alone_and_kept_for_compare(capsys):
    found = scored("--ema 0.1,0.05,0.07 --labels 3,1", capsys)
    assert list(found["widths"]) == ["0.05", "0.07", "0.1"]
    fids = {width: record["fid"] for width, record in found["widths"].items()}
    assert len(set(fids.values())) == 3
    assert str(found["best"]) == min(fids, key=lambda width: fids[width])
    alone = scored("--weights power_0.07 --labels 3,1", capsys)
    assert alone["fid"] == fids["0.07"]
    assert found["widths"]["0.07"] == alone
    assert Image.open(found["figure"]).size[0] > 400
    kept = read_evaluations("run/ema-curve.jsonl")
    assert {str(float(r["weights"][6:])): r["value"] for r in kept} == fids
    for known in kept:
        assert (known["step"], known["seeds"], known["labels"]) == (9, [0, 24], "3,1")
        assert (known["num_fake"], known["num_real"], known["data"]) == (24, 40, alone["data"])
        assert known["sampling"] == alone["samples"]["sampling"]
        assert known["floor"] == alone["fid_floor"]
    how, measured = fids_by_width(read_run(Path("run")))
    assert (how["step"], {str(width): fid for width, fid in measured.items()}) == (9, fids)


def test_a_width_that_the_run_cannot_give_is_refused_before_any_is_scored(capsys):
    assert call(f"{RUN} --ema 0.05,0.27") == 2
    assert "the width 0.27 at step 9 cannot be told from 2 snapshots" in capsys.readouterr().err
    assert not Path("run/ema-curve.jsonl").exists()


def test_without_matplotlib_nothing_is_scored(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(f"{RUN} --ema 0.05") == 2
    assert "pip install -e '.[lab]'" in capsys.readouterr().err
    assert not Path("run/ema-curve.jsonl").exists()


def test_what_goes_with_one_average_alone_is_refused(capsys):
    assert call(f"{RUN} --ema 0.05 --out made") == 2
    assert "leave out --images and --out" in capsys.readouterr().err
    assert call(f"{RUN} --ema 0.05 --weights raw") == 2
    assert "--ema names the averages; leave out --weights raw." in capsys.readouterr().err
    assert call(f"{RUN} --ema wide") == 2
    assert "must be numbers such as 0.05,0.1, got 'wide'" in capsys.readouterr().err


def test_a_run_without_power_averages_is_told_what_it_has(capsys):
    write_small_digits(Path("plain/checkpoints/last.ckpt"))
    assert call("evaluate --checkpoint plain --extractor digits-cnn --ema 0.05") == 2
    told = "--ema needs averages by PowerEMA, of which plain/checkpoints/last.ckpt has none; train "
    assert told + "with PowerEMA, or score --weights raw or ema_0.9." in capsys.readouterr().err
