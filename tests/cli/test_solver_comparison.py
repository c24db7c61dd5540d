import csv
import json
from pathlib import Path

import pytest
import torch
from support.commands import call
from support.small_digits import write_small_digits
from support.tiny_run import spec

LAST = "run/checkpoints/last.ckpt"


def compare(options, out="out"):
    return call(f"sample --checkpoint run --num 6 --out {out} --compare {options}")


@pytest.fixture(autouse=True)
def run(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    write_small_digits(Path(LAST))
    Path("run/evaluations.jsonl").write_text('{"protocol": "digits-cnn", "step": 3}\n')


def leave_out_scores():
    """As for data that have no splits to compare with."""
    Path("run/config.yaml").write_text("data: null")


def change_checkpoint(key, values):
    content = torch.load(LAST, weights_only=True)
    torch.save(content | {key: content[key] | values}, LAST)


def cells(out="out"):
    return json.loads(Path(out, "comparison.json").read_text())["cells"]


def same_images(a, b):
    names = sorted(file.name for file in Path(a).glob("*.png"))
    assert names == sorted(file.name for file in Path(b).glob("*.png"))
    return all(Path(a, name).read_bytes() == Path(b, name).read_bytes() for name in names)


def test_each_cell_has_the_images_of_sample_and_the_fid_of_evaluate(capsys):
    options = "--labels 3,1 --guidance 2 --seed 5 --weights raw"
    assert compare(f"DDIM,Heun,DDIM --compare_steps 4,2,4 {options}") == 0
    assert "FID of 6 images by digits-cnn against val, floor " in capsys.readouterr().err
    table = [(cell["solver"], cell["steps"], cell["evaluations"]) for cell in cells()]
    assert table == [("DDIM", 2, 2), ("DDIM", 4, 4), ("Heun", 2, 3), ("Heun", 4, 7)]
    one = f"--checkpoint run {options} --num 6 --solver Heun --steps 4"
    assert call(f"sample {one} --out heun") == 0
    assert same_images("heun", "out/Heun-4")
    assert not list(Path("out").rglob("trajectory.*"))
    capsys.readouterr()
    assert call(f"evaluate {one}") == 0
    scored = json.loads(capsys.readouterr().out)
    comparison = json.loads(Path("out/comparison.json").read_text())
    assert comparison["cells"][-1]["fid"] == pytest.approx(scored["fid"], rel=1e-3)
    assert comparison["scored"]["floor"] == pytest.approx(scored["fid_floor"], rel=1e-6)
    assert comparison["cells"][-1]["sampling"] == scored["samples"]["sampling"]
    with Path("out/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["fid"]) for row in rows] == [cell["fid"] for cell in cells()]


def test_solvers_that_the_process_refuses_are_named_with_the_reason(capsys):
    hyper = torch.load(LAST, weights_only=True)["hyper_parameters"]
    linear = spec("lit_diffusion.processes.LinearBetas")
    betas = spec("lit_diffusion.processes.ZeroTerminalSNR", base=linear)
    process = {**hyper["process"], "init_args": {"betas": betas}}
    solver = spec("lit_diffusion.solvers.DDIM", times=spec("lit_diffusion.grids.Even"))
    change_checkpoint("hyper_parameters", {"process": process, "solver": solver})
    leave_out_scores()
    assert compare("DDIM,Heun --compare_steps 1,2") == 0
    out, err = capsys.readouterr()
    assert "names no data with splits to compare with" in err
    assert "Left out: Heun in 1, 2 steps: Heun does not fit DiscreteVP: the solver needs" in out
    assert [bool(cell["left_out"]) for cell in cells()] == [False, False, True, True]
    assert compare("Heun --compare_steps 2", "none") == 2
    assert "no solver can run. Left out: Heun in 2 steps" in capsys.readouterr().err


def test_all_solvers_take_the_grid_that_the_run_names():
    times = spec("lit_diffusion.grids.LogSNR", noisiest=-4.0)
    solver = spec("lit_diffusion.solvers.DDIM", times=times)
    change_checkpoint("hyper_parameters", {"solver": solver})
    leave_out_scores()
    assert compare("solvers --compare_steps 2") == 0
    assert {cell["solver"] for cell in cells()} >= {"DDIM", "DDPM", "Euler", "Heun", "UniPC"}
    assert not any(cell["left_out"] for cell in cells())
    assert {cell["grid"] for cell in cells()} == {"LogSNR(noisiest=-4.0)"}
    same = {cell["solver"]: cell["same_as"] for cell in cells() if cell["same_as"]}
    assert same == {"Euler": "DDIM"}  # deterministic, on one grid
    assert not Path("out/Euler-2").exists()
    assert call("sample --checkpoint run --num 6 --out euler --solver Euler --steps 2") == 0
    assert same_images("euler", "out/DDIM-2")
