import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_digits, write_small_digits
from torch_fidelity import calculate_metrics

from lit_diffusion.metrics.extractors import EmbeddedCNN

RUN = "evaluate --checkpoint run --extractor digits-cnn"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
        **EmbeddedCNN("digits-cnn").fidelity_arguments(),
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
    torch.save(content, "data.ckpt")
    capsys.readouterr()
    images = "evaluate --images made --extractor digits-cnn"
    found = {}
    for split, num in (("train", 1437), ("val", 360)):
        given = "" if split == "val" else f"--reference {split}"
        assert call(f"{images} --checkpoint data.ckpt {given}") == 0
        found = json.loads(capsys.readouterr().out)
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
