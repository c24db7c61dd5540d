import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.fidelity import fidelity_arguments
from support.small_digits import write_digits, write_small_digits
from torch_fidelity import calculate_metrics

from lit_diffusion.cli import solver_comparison
from lit_diffusion.metrics.extractors import EmbeddedCNN

RUN = "evaluate --checkpoint run --extractor digits-cnn"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(folder):
    write_small_digits(Path("run/checkpoints/last.ckpt"))


def test_scores_are_torch_fidelitys_on_the_same_pngs(run, capsys):
    write_digits("real", "val", 40)
    assert call(f"{RUN} --reference real --num 30 --out made") == 0
    found = json.loads(capsys.readouterr().out)
    Path("made/grid.png").unlink()
    expected = calculate_metrics(
        input1="made",
        input2="real",
        fid=True,
        kid=True,
        prc=True,
        isc=True,
        kid_subset_size=15,
        cuda=False,
        cache=False,
        verbose=False,
        **fidelity_arguments(EmbeddedCNN("digits-cnn")),
    )
    for name, theirs in {
        "fid": "frechet_inception_distance",
        "kid": "kernel_inception_distance_mean",
        "precision": "precision",
        "recall": "recall",
        "inception_score": "inception_score_mean",
    }.items():
        assert found[name] == pytest.approx(expected[theirs], rel=1e-3, abs=1e-6)


def test_the_floor_has_the_labels_of_the_samples(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2") == 0
    told = capsys.readouterr()
    assert "20 train images with the samples' labels against val" in told.err
    assert call(f"{RUN} --num 20 --steps 2 --labels 0,1,2,3,4,5,6,7,8,9,-1") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["floor_images"] == "20 train images, 19 with the samples' labels, against val"


def test_the_record_tells_everything_that_the_scores_depend_on(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2 --labels 3 --seed 5 --weights raw") == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["num_fake"], found["num_real"], found["reference"]) == (20, 360, "val")
    assert (found["protocol"], len(found["extractor_sha256"])) == ("digits-cnn", 64)
    assert found["floor_images"] == "20 train images, 3 with the samples' labels, against val"
    assert 0 < found["floor_sd"] < found["fid_floor"]
    samples = found["samples"]
    assert (samples["weights"], samples["seeds"], samples["labels"]) == ("raw", [5, 25], [3])
    assert samples["sampling"]["steps"] == 2
    assert f"FID 20     {found['fid']:.4g}   (floor " in told.err


def test_as_many_images_as_are_real_are_made_with_the_protocol_of_the_run(run, capsys):
    write_digits("real", "val", 12)
    Path("run/evaluations.jsonl").write_text('{"protocol": "digits-cnn", "step": 3}\n')
    assert call("evaluate --checkpoint run --reference real") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_fake"], found["protocol"]) == (12, "digits-cnn")


def test_images_of_sample_are_scored_with_how_they_were_made(run, capsys):
    write_digits("real", "val", 12)
    call("sample --checkpoint run --num 12 --out made")
    capsys.readouterr()
    assert call("evaluate --images made --reference real --extractor digits-cnn") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_fake"] == 12
    assert found["samples"]["weights"] == "ema_0.9"


def test_a_checkpoint_beside_images_names_their_data_and_makes_none(run, capsys):
    call("sample --checkpoint run --num 12 --out made")
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    del content["hyper_parameters"]  # nothing is built of the module
    torch.save(content, "run/checkpoints/data.ckpt")
    capsys.readouterr()
    images = "evaluate --images made --extractor digits-cnn"
    found = {}
    for split, num in (("train", 1437), ("val", 360)):
        given = "" if split == "val" else f"--reference {split}"
        assert call(f"{images} --checkpoint run/checkpoints/data.ckpt {given}") == 0
        found = json.loads(capsys.readouterr().out)
        assert call(f"{images} --data run/config.yaml {given}") == 0
        assert json.loads(capsys.readouterr().out) == found
        assert (found["reference"], found["num_real"], found["num_fake"]) == (split, num, 12)
    write_digits("real", "val", 360)
    assert call(f"{images} --reference real") == 0
    assert found["fid"] == pytest.approx(json.loads(capsys.readouterr().out)["fid"], rel=1e-6)
    assert found["samples"]["checkpoint"] == "run/checkpoints/last.ckpt"


def test_real_images_score_better_than_noise(capsys):
    write_digits("real", "val", 60)
    write_digits("train", "train", 60)
    Path("noise").mkdir()
    for i in range(60):
        pixels = torch.randint(256, (8, 8), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.numpy().astype(np.uint8)).save(f"noise/{i:04d}.png")
    fids = []
    for images in ("train", "noise"):
        call(f"evaluate --images {images} --reference real --extractor digits-cnn")
        fids.append(json.loads(capsys.readouterr().out)["fid"])
    assert fids[0] < fids[1] / 4


def test_a_second_look_is_printed_and_recorded(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2") == 0
    told = capsys.readouterr()
    look = json.loads(told.out)["second_look"]
    for name in ("pixels", "random-cnn"):
        assert f"{name:<11}{look[name]:.4g}   (floor {look[f'{name} floor']:.4g})" in told.err
    assert f"memorized  {look['memorized']:.3f}" in told.err
    assert f"in pixels {look['pixel recall']:.3f}" in told.err


LONE = {
    "evaluate --checkpoint lone.ckpt --extractor digits-cnn --num 8 --steps 1": 2,
    "evaluate --checkpoint lone.ckpt --images real --extractor digits-cnn": 2,
    "sample --checkpoint lone.ckpt --num 8 --out out --compare DDIM --compare_steps 1": 0,
    "analyze hessian lone.ckpt --images 2 --levels 0.5 --steps 2 --vectors 1 --out out": 2,
    "analyze landscape lone.ckpt --images 2 --levels 0.5 --points 3 --out out": 2,
    "analyze interpolate lone.ckpt lone.ckpt --images 2 --levels 0.5 --points 2 --out out": 2,
    "analyze consistency lone.ckpt lone.ckpt --num 2 --extractor digits-cnn --out out": 2,
}
"""Commands that read data, of a checkpoint that lies in no run folder, and their exit codes."""


@pytest.fixture
def touched(folder):
    """Paths below elsewhere/ that this process has opened or listed."""
    root, paths = str(folder / "elsewhere"), []

    def note(event, args):
        if event in ("open", "os.scandir", "os.listdir") and root in os.path.abspath(str(args[0])):
            paths.append(args[0])

    sys.addaudithook(note)  # for good, so it looks for a path of this test alone
    return paths


@pytest.mark.parametrize("name", ["image_folder.ImageFolder", "streaming.StreamedImages"])
@pytest.mark.parametrize("command", LONE)
def test_data_that_a_checkpoint_alone_names_are_not_touched(
    run, capsys, monkeypatch, touched, name, command
):
    monkeypatch.setattr(solver_comparison, "protocol_of_run", lambda _: "digits-cnn")
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    data = {"_class_path": f"lit_diffusion.data.{name}", "train": "elsewhere", "val": "elsewhere"}
    content["datamodule_hyper_parameters"] = data | {"image_size": 8, "channels": 1}
    torch.save(content, "lone.ckpt")
    write_digits("real", "val", 8)
    write_digits("elsewhere", "val", 8)
    touched.clear()
    assert call(command) == LONE[command]
    assert "pass --data CONFIG" in capsys.readouterr().err
    assert not touched
    assert call(f"{command.replace('out out', 'out other')} --data run/config.yaml") == 0
    assert not touched
    torch.save(content, "run/checkpoints/lone.ckpt")  # where the run's config is asked
    again = command.replace("lone.ckpt", "run/checkpoints/lone.ckpt").replace("out out", "out new")
    assert call(again) == 0
    assert not touched
