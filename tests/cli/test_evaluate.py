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

from lit_diffusion.checkpoints.averages import write_snapshot
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli import evaluate, solver_comparison
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.lab.compare.run_folders import read_run
from lit_diffusion.lab.compare.run_tables import fids_by_width
from lit_diffusion.metrics.extractors import EmbeddedCNN
from lit_diffusion.metrics.small_classifier import SmallClassifier

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
    record = json.loads(capsys.readouterr().out)
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
        assert record[name] == pytest.approx(expected[theirs], rel=1e-3, abs=1e-6)


def test_each_image_passes_the_extractor_once(run, monkeypatch, capsys):
    write_digits("real", "val", 40)
    passed, forward = [], SmallClassifier.forward

    def count(network, images):
        passed.append(len(images))
        return forward(network, images)

    monkeypatch.setattr(SmallClassifier, "forward", count)
    for extra in (40, 0):  # the first floor draws real images, the second is in the cache
        passed.clear()
        assert call(f"{RUN} --reference real --num 20 --steps 2") == 0
        assert sum(passed) == 40 + 20 + extra


def test_the_floor_has_the_labels_of_the_samples_and_the_table_other_metrics(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2") == 0
    output = capsys.readouterr()
    record = json.loads(output.out)
    assert record["floor_images"] == "20 train images with the samples' labels against val"
    assert f"FID 20     {record['fid']:.4g}   (floor " in output.err
    others = record["second_look"]
    for name in ("pixels", "random-cnn"):
        line = f"{name:<11}{others[name]:.4g}   (floor {others[f'{name} floor']:.4g})"
        assert line in output.err
    assert f"memorized  {others['memorized']:.3f}" in output.err
    assert f"in pixels {others['pixel recall']:.3f}" in output.err


def test_the_record_has_everything_that_the_scores_depend_on(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2 --labels 3,-1 --seed 5 --weights raw") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_fake"], record["num_real"], record["reference"]) == (20, 360, "val")
    assert (record["protocol"], len(record["extractor_sha256"])) == ("digits-cnn", 64)
    assert record["floor_images"] == "20 train images, 3 with the samples' labels, against val"
    assert 0 < record["floor_sd"] < record["fid_floor"]
    samples = record["samples"]
    assert (samples["weights"], samples["seeds"], samples["labels"]) == ("raw", [5, 25], [3, -1])
    assert samples["sampling"]["steps"] == 2


def test_as_many_images_as_are_real_are_generated_with_the_protocol_of_the_run(run, capsys):
    write_digits("real", "val", 12)
    Path("run/evaluations.jsonl").write_text('{"protocol": "digits-cnn", "step": 3}\n')
    assert call("evaluate --checkpoint run --reference real --out images") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_fake"], record["protocol"]) == (12, "digits-cnn")
    assert call("evaluate --images images --reference real --extractor digits-cnn") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["samples"]["weights"] == "ema_0.9"
    assert again["fid"] == record["fid"]


def test_a_checkpoint_beside_images_names_their_data_and_makes_none(run, capsys):
    call("sample --checkpoint run --num 12 --out made")
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    del content["hyper_parameters"]  # nothing is built of the module
    torch.save(content, "run/checkpoints/data.ckpt")
    capsys.readouterr()
    images = "evaluate --images made --extractor digits-cnn"
    record = {}
    for split, num in (("train", 1437), ("val", 360)):
        option = "" if split == "val" else f"--reference {split}"
        assert call(f"{images} --checkpoint run/checkpoints/data.ckpt {option}") == 0
        record = json.loads(capsys.readouterr().out)
        assert call(f"{images} --data run/config.yaml {option}") == 0
        assert json.loads(capsys.readouterr().out) == record
        assert (record["reference"], record["num_real"], record["num_fake"]) == (split, num, 12)
    write_digits("real", "val", 360)
    assert call(f"{images} --reference real") == 0
    assert record["fid"] == pytest.approx(json.loads(capsys.readouterr().out)["fid"], rel=1e-6)
    assert record["samples"]["checkpoint"] == "run/checkpoints/last.ckpt"


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


@pytest.mark.quick
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


# Mistakes


MAKING = {
    "--num": 5,
    "--out": "other",
    "--weights": "ema",
    "--labels": 1,
    "--prompt": "seven",
    "--steps": 2,
    "--solver": "ddim",
    "--guidance": 1,
    "--guidance_interval": "0.1,2",
    "--guidance_rescale": 0.7,
    "--weaker": "run",
    "--classifier": "run",
    "--init": "full",
    "--strength": 0.5,
    "--mask": "mask.png",
    "--seed": 0,
    "--ema": 0.05,
}


def test_options_for_making_images_are_refused_beside_images_by_name(run, capsys):
    for name, value in MAKING.items():
        for option in (f"{name} {value}", f"{name}={value}"):
            assert call(f"evaluate --images x --checkpoint run {option}") == 2
            assert f"leave out {name}, which would" in capsys.readouterr().err
    assert call("evaluate --images x --seed 3 --reference real --steps 2") == 2
    message = "--images scores images as they are; leave out --seed, --steps, which would say how"
    assert message in capsys.readouterr().err


def test_every_option_is_for_images_or_for_making_them():
    names = {name for action in evaluate.build_parser()._actions for name in action.option_strings}
    assert names - {"-h", "--help"} == {*evaluate.WITH_IMAGES, *MAKING}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate", "give --checkpoint C, --images DIR, or both."),
        ("evaluate --images x", "--images needs either --reference, a folder"),
        ("evaluate --images x --reference val", "--images needs either --reference, a folder"),
        ("evaluate --images x --checkpoint run --reference full", "--images needs either --refer"),
        ("evaluate --images x --data run/config.yaml --reference full", "--images needs either --"),
        ("evaluate --data nowhere.yaml --images full --extractor digits-cnn", "There is no config"),
        ("evaluate --images full --checkpoint nowhere --extractor digits-cnn", "no checkpoint at"),
        ("evaluate --images full --checkpoint run --batch-size 0", "--batch-size must be at"),
        (f"{RUN} --reference nowhere", "nowhere is neither a folder of images nor an .npz"),
        (f"{RUN}x", "there is no FID protocol 'digits-cnnx'"),
        (f"{RUN} --out full", "--out full already holds images"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(run, capsys, command, message):
    write_digits("full", "val", 1)
    assert call(command) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)


# Averages of several widths


@pytest.fixture
def power_run(run):
    """With averages of widths 0.05 and 0.1, which are far apart, and snapshots of them."""
    write_digits("real", "val", 40)
    file = Path("run/checkpoints/last.ckpt")
    content = torch.load(file, weights_only=True)
    state = content["callbacks"].pop("EMA{'prefix': ''}")
    narrow = state["shadows"][0]
    wide = {name: 0.7 * value for name, value in narrow.items()}
    widths = {"decays": [0.05, 0.1], "shadows": [narrow, wide]}
    folder, averages = Path("run/ema-snapshots"), {0.05: narrow, 0.1: wide}
    snapshots = {step: write_snapshot(folder, step, averages) for step in (3, 6, 9)}
    content["callbacks"]["PowerEMA{'prefix': ''}"] = state | widths | {"snapshots": snapshots}
    write_checkpoint(content, file)


WIDTHS = f"{RUN} --reference real --num 24 --steps 2"


def scored(options, capsys):
    assert call(f"{WIDTHS} {options}") == 0
    return json.loads(capsys.readouterr().out)


def test_each_width_is_scored_as_if_alone_and_kept_for_compare(power_run, capsys):
    record = scored("--ema 0.1,0.05,0.07 --labels 3,1", capsys)
    assert list(record["widths"]) == ["0.05", "0.07", "0.1"]
    fids = {width: record["fid"] for width, record in record["widths"].items()}
    assert len(set(fids.values())) == 3
    assert str(record["best"]) == min(fids, key=lambda width: fids[width])
    alone = scored("--weights power_0.07 --labels 3,1", capsys)
    assert alone["fid"] == fids["0.07"]
    assert record["widths"]["0.07"] == alone
    assert Image.open(record["figure"]).size[0] > 400
    curve = read_evaluations("run/ema-curve.jsonl")
    assert {str(float(r["weights"][6:])): r["value"] for r in curve} == fids
    for row in curve:
        assert (row["step"], row["seeds"], row["labels"]) == (9, [0, 24], "3,1")
        assert (row["num_fake"], row["num_real"], row["data"]) == (24, 40, alone["data"])
        assert row["sampling"] == alone["samples"]["sampling"]
        assert row["floor"] == alone["fid_floor"]
    settings, measured = fids_by_width(read_run(Path("run")))
    assert (settings["step"], {str(width): fid for width, fid in measured.items()}) == (9, fids)


def test_a_width_that_the_run_cannot_give_is_refused_before_any_is_scored(power_run, capsys):
    assert call(f"{WIDTHS} --ema 0.05,0.27") == 2
    assert "the width 0.27 at step 9 cannot be told from 2 snapshots" in capsys.readouterr().err
    assert not Path("run/ema-curve.jsonl").exists()


def test_what_goes_with_one_average_alone_is_refused(power_run, capsys):
    assert call(f"{WIDTHS} --ema 0.05 --out made") == 2
    assert "leave out --images and --out" in capsys.readouterr().err
    assert call(f"{WIDTHS} --ema 0.05 --weights raw") == 2
    assert "--ema names the averages; leave out --weights raw." in capsys.readouterr().err
    assert call(f"{WIDTHS} --ema wide") == 2
    assert "must be numbers such as 0.05,0.1, got 'wide'" in capsys.readouterr().err


def test_a_run_without_power_averages_is_told_what_it_has(capsys):
    write_small_digits(Path("plain/checkpoints/last.ckpt"))
    assert call("evaluate --checkpoint plain --extractor digits-cnn --ema 0.05") == 2
    message = (
        "--ema needs averages by PowerEMA, of which plain/checkpoints/last.ckpt has none; train "
    )
    assert message + "with PowerEMA, or score --weights raw or ema_0.9." in capsys.readouterr().err


def test_without_matplotlib_nothing_is_scored(power_run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(f"{WIDTHS} --ema 0.05") == 2
    assert "pip install -e '.[lab]'" in capsys.readouterr().err
    assert not Path("run/ema-curve.jsonl").exists()
