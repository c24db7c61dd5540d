import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from support.commands import call
from support.small_digits import write_digits, write_small_digits
from support.tiny_run import spec
from support.vision_transformers import publish, write_clip

from lit_diffusion.checkpoints.averages import write_snapshot
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli import evaluate, evaluating, solver_comparison
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.run_data import protocol_of_run
from lit_diffusion.lab.compare.run_folders import read_run
from lit_diffusion.lab.compare.run_tables import fids_by_width
from lit_diffusion.metrics.extractors import EmbeddedCNN
from lit_diffusion.metrics.score import score_images
from lit_diffusion.metrics.small_classifier import SmallClassifier
from lit_diffusion.metrics.vision_transformers import CLIP
from lit_diffusion.metrics.weight_files import WEIGHT_FILES

RUN = "evaluate --checkpoint run --extractor digits-cnn"


@pytest.fixture(autouse=True)
def folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    return tmp_path


@pytest.fixture
def run(folder):
    write_small_digits(Path("run/checkpoints/last.ckpt"))


def test_scores_are_those_of_the_pngs_and_each_passes_the_extractor_once(
    run, monkeypatch, folder, capsys
):
    """Those of torch-fidelity are in tests/metrics/test_score.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_digits("real", "val", 40)
    passed, forward = [], SmallClassifier.forward

    def count(network, images):
        passed.append(len(images))
        return forward(network, images)

    monkeypatch.setattr(SmallClassifier, "forward", count)
    for extra in (40, 0):  # the first floor draws real images, the second is in the cache
        passed.clear()
        assert call(f"{RUN} --reference real --num 20 --steps 2 --out fake{extra}") == 0
        assert sum(passed) == 40 + 20 + extra
        record = json.loads(capsys.readouterr().out)
    scores = score_images("fake0", "real", EmbeddedCNN("digits-cnn"))
    assert {name: record[name] for name in scores} == scores


def test_the_record_has_everything_that_the_scores_depend_on(run, capsys):
    assert call(f"{RUN} --num 20 --steps 2 --labels 3,-1 --seed 5 --weights raw") == 0
    output = capsys.readouterr()
    record = json.loads(output.out)
    assert (record["num_fake"], record["num_real"], record["reference"]) == (20, 360, "val")
    assert (record["protocol"], len(record["extractor_sha256"])) == ("digits-cnn", 64)
    assert record["floor_images"] == "20 train images, 3 with the samples' labels, against val"
    assert 0 < record["floor_sd"] < record["fid_floor"]
    samples = record["samples"]
    assert (samples["weights"], samples["seeds"], samples["labels"]) == ("raw", [5, 25], [3, -1])
    assert samples["sampling"]["steps"] == 2
    assert f"FID 20     {record['fid']:.4g}   (floor " in output.err
    others = record["second_look"]
    for name in ("pixels", "random-cnn"):
        line = f"{name:<11}{others[name]:.4g}   (floor {others[f'{name} floor']:.4g})"
        assert line in output.err
    assert f"memorized  {others['memorized']:.3f}" in output.err
    assert f"in pixels {others['pixel recall']:.3f}" in output.err


def test_another_distance_is_printed_under_its_name(folder, monkeypatch, capsys):
    """And without the inception score, because its extractor does not classify."""
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    path = WEIGHT_FILES[CLIP.name].cached_path()
    path.parent.mkdir(parents=True)
    publish(monkeypatch, CLIP, write_clip(path))
    write_digits("real", "val", 20)
    write_digits("fake", "train", 12)
    assert call("evaluate --images fake --reference real --extractor clip-vit-b-32") == 0
    output = capsys.readouterr()
    record = json.loads(output.out)
    assert (record["metric"], record["protocol"]) == ("fd_clip", "clip-vit-b-32")
    assert f"FD-CLIP 12 {record['fid']:.4g}   (floor {record['fid_floor']:.4g}" in output.err
    assert "IS  " not in output.err


@pytest.mark.slow
def test_a_folder_is_scored_as_when_it_was_generated_and_against_other_data(run, capsys):
    write_digits("real", "val", 12)
    Path("run/evaluations.jsonl").write_text('{"protocol": "digits-cnn", "step": 3}\n')
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    del content["hyper_parameters"]  # nothing is built of the module
    torch.save(content, "run/checkpoints/data.ckpt")
    records = []
    for command in (
        "--checkpoint run --reference real --steps 1 --out images",
        "--images images --reference real --extractor digits-cnn",
        "--images images --data run/config.yaml --reference train --extractor digits-cnn",
        "--images images --checkpoint run/checkpoints/data.ckpt",
    ):
        assert call(f"evaluate {command}") == 0
        records.append(json.loads(capsys.readouterr().out))
    generated, folder, train, val = records
    assert generated["fid"] == folder["fid"]
    assert folder["samples"] == generated["samples"]
    assert (train["reference"], train["num_real"]) == ("train", 1437)
    assert (val["reference"], val["num_real"]) == ("val", 360)
    for record in records:
        assert (record["num_fake"], record["protocol"]) == (12, "digits-cnn")


LONE = {
    "evaluate --checkpoint lone.ckpt --extractor digits-cnn --num 8 --steps 1": 2,
    "evaluate --checkpoint lone.ckpt --images real --extractor digits-cnn": 2,
    "sample --checkpoint lone.ckpt --num 8 --out out --compare DDIM --compare_steps 1": 0,
    "analyze hessian lone.ckpt --images 2 --levels 0.5 --steps 2 --vectors 1 --out out": 2,
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
@pytest.mark.parametrize("command", LONE)
def test_data_that_a_checkpoint_alone_names_are_not_touched(
    run, capsys, monkeypatch, touched, command
):
    monkeypatch.setattr(solver_comparison, "protocol_of_run", lambda _: "digits-cnn")
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    path = "lit_diffusion.data.image_folder.ImageFolder"
    data = {"_class_path": path, "train": "elsewhere", "val": "elsewhere"}
    content["datamodule_hyper_parameters"] = data | {"image_size": 8, "channels": 1}
    torch.save(content, "lone.ckpt")
    write_digits("real", "val", 8)
    write_digits("elsewhere", "val", 8)
    touched.clear()
    assert call(command) == LONE[command]
    assert "add --data CONFIG" in capsys.readouterr().err
    assert not touched
    assert call(f"{command.replace('out out', 'out other')} --data run/config.yaml") == 0
    assert not touched
    torch.save(content, "run/checkpoints/lone.ckpt")  # where the run's config is asked
    again = command.replace("lone.ckpt", "run/checkpoints/lone.ckpt").replace("out out", "out new")
    assert call(again) == 0
    assert not touched


# Mistakes


def test_options_for_generating_images_are_refused_beside_images_by_name(run, capsys):
    actions = evaluate.build_parser()._actions
    options = {name for action in actions for name in action.option_strings}
    for name in options - {"-h", "--help", *evaluate.WITH_IMAGES}:
        value = {"--guidance_interval": "0.1,2", "--float32_precision": "tf32"}.get(name, 1)
        assert call(f"evaluate --images x --checkpoint run {name}={value}") == 2
        assert f"leave out {name}, which set" in capsys.readouterr().err
    assert call("evaluate --images x --seed 3 --reference real --steps 2") == 2
    assert "leave out --seed, --steps, which set how" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate", "add --checkpoint C, --images DIR, or both."),
        ("evaluate --images x", "--images needs real images: add --reference with a folder"),
        ("evaluate --data nowhere.yaml --images full --extractor digits-cnn", "There is no config"),
        (f"{RUN}x", "there is no FID protocol 'digits-cnnx'"),
        (f"{RUN} --out full", "--out full already has images"),
        (f"{RUN} --num 0", "--num must be at least 1, got 0."),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(run, capsys, command, message):
    write_digits("full", "val", 1)
    assert call(command) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("other", ["photo.jpg", "earlier/000000.png"])
def test_only_generated_images_are_scored(run, folder, capsys, other):
    Path("out/earlier").mkdir(parents=True)
    Image.new("L", (8, 8)).save(f"out/{other}")
    assert call(f"{RUN} --num 12 --steps 1 --out out") == 2
    assert f"--out out has other images, such as out/{other}, which" in capsys.readouterr().err
    assert [str(p) for p in Path("out").rglob("*.*")] == [f"out/{other}"]


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_stopped_leaves_no_temporary_folder(run, folder, monkeypatch, number):
    (folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    handled = []

    def stopped(*_):
        handled.append(callable(signal.getsignal(number)))
        os.kill(os.getpid(), number if handled[0] else signal.SIGINT)

    monkeypatch.setattr(evaluating, "extract_features", stopped)
    assert call(f"{RUN} --num 2 --steps 1") == 128 + number
    assert not list((folder / "temporary").iterdir())


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


WIDTHS = f"{RUN} --reference real --num 12 --steps 1"


def test_each_width_is_scored_as_if_alone_and_recorded_for_compare(power_run, capsys):
    records = []
    for option in ("--ema 0.1,0.07", "--weights power_0.07"):
        assert call(f"{WIDTHS} {option} --labels 3,1") == 0
        records.append(json.loads(capsys.readouterr().out))
    record, alone = records
    assert list(record["widths"]) == ["0.07", "0.1"]
    assert record["widths"]["0.07"] == alone
    fids = {width: record["fid"] for width, record in record["widths"].items()}
    assert fids["0.07"] != fids["0.1"]
    assert str(record["best"]) == min(fids, key=lambda width: fids[width])
    assert Image.open(record["figure"]).size[0] > 400
    curve = read_evaluations("run/ema-curve.jsonl")
    assert {str(float(r["weights"][6:])): r["value"] for r in curve} == fids
    row = curve[0]
    assert (row["step"], row["seeds"], row["labels"]) == (9, [0, 12], "3,1")
    assert (row["num_fake"], row["num_real"], row["data"]) == (12, 40, alone["data"])
    assert row["sampling"] == alone["samples"]["sampling"]
    assert row["floor"] == alone["fid_floor"]
    settings, measured = fids_by_width(read_run(Path("run")))
    assert (settings["step"], {str(width): fid for width, fid in measured.items()}) == (9, fids)


def test_an_unscored_run_has_the_extractor_of_its_config(run):
    assert protocol_of_run(None) == protocol_of_run("run") == "inception-v3-compat"

    def configure(extractor):
        fid = spec("lit_diffusion.callbacks.FIDEvaluation", extractor=extractor)
        Path("run/config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": ["EMA", fid]}}))
        return protocol_of_run("run")

    assert configure("digits-cnn") == "digits-cnn"
    assert configure(spec("EmbeddedCNN", name="patches-cnn")) == "patches-cnn"
    assert configure(spec("DINOv2")) == "dinov2-vit-l-14"
    assert configure(spec("CLIP", weights_path=None)) == "clip-vit-b-32"
    with pytest.raises(ValueError, match=r"got .*mine.pt.*; .* --extractor"):
        configure(spec("CLIP", weights_path="mine.pt"))
    path = "elsewhere/own.safetensors"
    Path("run/own-12345678.safetensors").touch()
    assert Path(configure(spec("TrainedCNN", path=path))).name == "own-12345678.safetensors"
    Path("run/own-9abcdef0.safetensors").touch()
    with pytest.raises(ValueError, match=r"one copy .*, has .*; .* --extractor"):  # which?
        configure(path)
    with pytest.raises(ValueError, match=r"got .*my\.EmbeddedCNN.*; .* --extractor"):
        configure(spec("my.EmbeddedCNN", name="digits-cnn"))


def test_a_record_names_no_extractor_outside_of_its_run_folder(run):
    Path("x.safetensors").touch()
    for exists in (False, True):
        for name in ("x", "../x", "/x", "x.safetensors", "../x.safetensors"):
            record = {"step": 1, "value": 1.0, "protocol": name}
            Path("run/evaluations.jsonl").write_text(json.dumps(record) + "\n")
            expected = str(Path("run/x.safetensors").absolute()) if exists else "x"
            assert protocol_of_run("run") == expected
        Path("run/x.safetensors").touch()


def test_what_widths_exclude_is_refused_before_any_is_scored(power_run, capsys, monkeypatch):
    write_small_digits(Path("plain/checkpoints/last.ckpt"))
    shutil.copytree("run/checkpoints", "weak/checkpoints")  # without snapshots
    for command, message in {
        f"{WIDTHS} --ema 0.05,0.13 --weaker weak": "cannot be reconstructed from 0 snapshots",
        f"{WIDTHS} --ema 0.05,0.27": "width 0.27 at step 9 cannot be reconstructed",
        f"{WIDTHS} --ema 0.05 --out fake": "leave out --out.",
        f"{WIDTHS} --ema 0.05 --weights raw": "leave out --weights raw.",
        f"{WIDTHS} --ema wide": "must be numbers such as 0.05,0.1, got 'wide'",
        "evaluate --checkpoint plain --ema 0.05": "or score --weights raw or ema_0.9.",
    }.items():
        assert call(command) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(f"{WIDTHS} --ema 0.05") == 2
    assert "pip install -e '.[lab]'" in capsys.readouterr().err
    assert not Path("run/ema-curve.jsonl").exists()
