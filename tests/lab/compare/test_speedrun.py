"""The speedrun: its rules, its targets, and a real one with two seeds."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from support.commands import call

from lit_diffusion.config.shipped import shipped_configs
from lit_diffusion.lab.compare import speedrun, sweep
from lit_diffusion.lab.compare.curves import Bound, Crossing, read_arms
from lit_diffusion.lab.compare.sweep import PlannedRun, fit_settings

ROOT = Path(__file__).parents[3]
TRACK = str(shipped_configs() / "digits-ablation.yaml")
AT_50 = {"fast", "static", "textbook", "edm-tuned"}
"""Recipes whose published runs were evaluated every 50 steps."""

RECIPES = ["fast", "static", "balanced", "textbook", "edm-tuned", "decayed"]


def record(step, fid, held_out=0.1, seeds=(0, 1440)):
    others = {"held-out": held_out, "pixels": 0.1, "random-cnn": 0.01}
    return {"step": step, "value": fid, "second_look": others, "seeds": seeds, "num_fake": 1440}


def settings(*files, options=()):
    return fit_settings(
        "arm", [TRACK, *map(str, files)], [*speedrun.fixed_options(), *map(str, options)]
    )


def entry(name, *crossings):
    return speedrun.Entry(name, crossings, None)


def exact(*steps):
    return [Crossing(step) for step in steps]


@pytest.fixture(scope="module")
def track():
    return settings()


def test_all_targets_must_be_reached_in_one_evaluation():
    records = [record(100, 0.62, 0.2), record(200, 0.155, 0.9), record(300, 0.31, 0.45)]
    curve = speedrun.score_curve([*records, record(300, 0.01, seeds=(1440, 2880))], seed=30)
    assert curve.fids == pytest.approx((2.0, 2.0, 1.0))
    assert curve.crossing(1.0) == Crossing(300.0)


def test_samples_that_are_not_finite_reach_nothing():
    curve = speedrun.score_curve([record(100, None), record(200, 0.62)], seed=30)
    assert curve.crossing(1.0) == Crossing(200, Bound.MORE_THAN)


def test_the_records_are_those_of_the_recipes_and_of_the_page():
    entries = {entry.name: entry for entry in speedrun.read_entries(speedrun.RECORDS)}
    arms = {arm.name: arm for arm in read_arms([str(ROOT / "docs/results/recipes.csv")])}
    assert entries.keys() >= AT_50
    for arm in (arm for arm in arms.values() if arm.name in entries):
        for curve in arm.curves:
            assert all(step % speedrun.EVALUATE_EVERY == 0 for step in curve.steps)
            assert curve.steps[0] == speedrun.EVALUATE_EVERY
            triples = zip(curve.steps, curve.fids, curve.other_metrics, strict=True)
            records = [record(s, f) | {"second_look": others} for s, f, others in triples]
            crossing = speedrun.score_curve(records, curve.seed).crossing(1.0)
            expected = entries[arm.name].crossings[int(curve.seed) - 30]
            assert expected == Crossing(round(crossing.step, 1), crossing.bound)
    table = speedrun.records_table([*entries.values()]).markdown().partition("\n\n")[2]
    assert table in (ROOT / "docs/speedrun.md").read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_keep_the_rules(track, recipe):
    entry = settings(shipped_configs() / "arms" / "digits" / f"{recipe}.yaml")
    speedrun.check_rules(entry, track)
    speedrun.check_network(entry["model"], trust=())


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--data.batch_size=128", "data.batch_size"),
        ("--data.seed=1", "data.seed"),
        ("--model.num_classes=5", "model.num_classes"),
        ("--model.image_shape=[1,4,4]", "model.image_shape"),
        ("--trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches"),
        ("--trainer.val_check_interval=25", "trainer.val_check_interval"),
        ("--trainer.callbacks.FIDEvaluation.num_samples=100", "trainer.callbacks.FIDEvaluation"),
        ("--trainer.callbacks.FIDEvaluation=null", "trainer.callbacks.FIDEvaluation"),
    ],
)
def test_a_fixed_setting_that_was_changed_is_named(track, option, name):
    with pytest.raises(ValueError, match=f"must not change {name}; it may change the model"):
        speedrun.check_rules(settings(options=[option]), track)


def test_no_run_ends_between_two_evaluations(track):
    with pytest.raises(ValueError, match="multiple of 50, got 317"):
        speedrun.check_rules(settings(options=["--trainer.max_steps=317"]), track)


GUIDED = (
    *("--model.label_dropout=0.1", "--model.guidance=lit_diffusion.guidance.ClassifierFree"),
    "--model.guidance.scale=1.5",
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.network.model_channels=40"], "760,000 parameters and buffers, got 1,"),
        (["--model.solver.steps=21"], "20 evaluations of the network per sample, got 21"),
        (GUIDED, "20 evaluations of the network per sample, got 40"),
    ],
)
def test_networks_and_samplers_are_bounded(options, message):
    with pytest.raises(ValueError, match=message):
        speedrun.check_network(settings(options=options)["model"], trust=())


def test_guidance_with_half_of_the_steps_is_allowed():
    speedrun.check_network(
        settings(options=[*GUIDED, "--model.solver.steps=10"])["model"], trust=()
    )


MEMORY = """
import torch
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.networks.unet import UNet

class BufferedUNet(UNet):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.register_buffer("memory", torch.zeros(4000), persistent=False)

class Codec(torch.nn.Module):
    bounded = True

    def __init__(self):
        super().__init__()
        self.memory = torch.nn.Parameter(torch.zeros(4000))

    encoded_shape, encode, decode = PixelCodec.encoded_shape, PixelCodec.encode, PixelCodec.decode
"""


@pytest.mark.parametrize("part", ["network", "codec"])
def test_buffers_and_other_parts_of_the_module_count_as_parameters(tmp_path, monkeypatch, part):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "speedrun_memory.py").write_text(MEMORY)
    model = settings()["model"]
    if part == "network":
        model["init_args"]["network"]["class_path"] = "speedrun_memory.BufferedUNet"
    else:
        model["init_args"]["codec"] = {"class_path": "speedrun_memory.Codec"}
    with pytest.raises(ValueError, match="parameters and buffers, got 760,289"):
        speedrun.check_network(model, trust=["speedrun_memory"])


def test_an_auxiliary_loss_does_not_count_as_parameters():
    network = {"image_size": 8, "in_channels": 1, "out_channels": 1, "num_classes": 10}
    network |= {"width": 64, "depth": 3, "num_heads": 2, "patch_size": 2}
    losses = "lit_diffusion.auxiliary_losses"
    teacher = {"class_path": f"{losses}.SelfTeacher", "init_args": {"block": "blocks.2"}}
    loss = {"block": "blocks.0", "width": 64, "hidden": [8192], "teacher": teacher}
    model = settings()["model"]
    model["init_args"] |= {
        "network": {"class_path": "lit_diffusion.networks.dit.DiT", "init_args": network},
        "auxiliary_loss": {"class_path": f"{losses}.RepresentationAlignment", "init_args": loss},
    }
    speedrun.check_network(model, trust=())


def test_a_record_needs_all_seeds_and_an_interval_above_one():
    old = entry("old", *exact(*range(300, 310)))
    faster = speedrun.describe(entry("new", *exact(*range(200, 210))), old)
    assert "10 of 10 seeds reached the targets, after 204 steps" in faster
    assert faster.endswith("This is a new record.")
    equal = speedrun.describe(entry("new", *exact(*range(299, 309))), old)
    censored = (*exact(*range(200, 209)), Crossing(209, Bound.MORE_THAN))
    missing = speedrun.describe(entry("new", *censored), old)
    assert equal.endswith("This is not a new record.")
    assert missing.endswith("This is not a new record.")


def test_a_short_run_that_misses_the_targets_does_not_hold_the_record():
    missed = entry("missed", *exact(40, 40), Crossing(50, Bound.MORE_THAN))
    slow, fast = entry("slow", *exact(500, 510, 520)), entry("fast", *exact(300, 310, 320))
    assert speedrun.record_holder([missed, slow, fast]) is fast
    rows = speedrun.records_table([missed, slow, fast]).rows
    assert [row[0] for row in rows] == ["fast", "slow", "missed"]
    assert rows[0][3].startswith("1.00x")


def test_the_table_of_records_keeps_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "SEEDS", (30, 31, 32))
    written = entry(
        "new", Crossing(50, Bound.AT_MOST), Crossing(61.5), Crossing(100, Bound.MORE_THAN)
    )
    file = tmp_path / "speedrun.csv"
    file.write_text(speedrun.entry_csv(written))
    assert speedrun.read_entries(file) == [written]


TRAINED = "trained     100 steps, 6,400 images seen, in 0:00:{}\n"


@pytest.mark.parametrize(
    ("logs", "configs", "seconds"),
    [
        ([20], ["config.yaml"], 15.0),
        ([20, 50], ["config.yaml"], None),
        ([20], ["config.yaml", "config.resume-1.yaml"], None),
        ([], ["config.yaml"], None),
    ],
)
def test_seconds_are_unknown_if_a_run_was_resumed(tmp_path, logs, configs, seconds):
    (tmp_path / "fit.log").write_text("".join(TRAINED.format(each) for each in logs))
    for config in configs:
        (tmp_path / config).write_text("{}")
    evaluation = record(100, 0.1) | {"metric": "val/fid_1440", "seconds": {"total": 5.0}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    run = PlannedRun("new", 30, tmp_path, (), 100)
    assert speedrun.measure("new", [run]).seconds == seconds


def test_all_runs_are_evaluated_at_the_same_interval(tmp_path, monkeypatch):
    planned = []

    class NoSweep:
        finished = ()

        def __init__(self, runs, jobs):
            planned.extend(runs)

        def run(self):
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "Sweep", NoSweep)
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {"val_check_interval": 10}}))
    assert call("speedrun mine.yaml") == 1
    assert len(planned) == 10
    assert fit_settings("mine", [], planned[0].options)["trainer"]["val_check_interval"] == 50


def test_a_recipe_that_breaks_a_rule_starts_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"batch_size": 8}}}))
    assert call("speedrun mine.yaml") == 2
    assert "a speedrun must not change data.batch_size" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_speedrun_trains_each_seed_and_writes_rows_for_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speedrun, "SEEDS", (30, 31))
    monkeypatch.setattr(speedrun, "TARGETS", {"fid": 1e9})
    monkeypatch.setattr(speedrun, "EVALUATE_EVERY", 2)
    steps = {"trainer": {"max_steps": 2}}
    few = {"model": {"init_args": {"solver": {"init_args": {"steps": 1}}}}}
    Path("mine.yaml").write_text(yaml.safe_dump(steps | few))
    assert call("speedrun mine.yaml --commit abc") == 0
    out = capsys.readouterr().out
    assert "mine: 2 of 2 seeds reached the targets, after <= 2 steps" in out
    rows = list(csv.DictReader(Path("runs/speedrun-mine/speedrun.csv").read_text().splitlines()))
    assert [(row["seed"], row["bound"], row["step"]) for row in rows] == [
        ("30", "<=", "2"),
        ("31", "<=", "2"),
    ]
    assert {row["commit"] for row in rows} == {"abc"}
    assert call("speedrun") == 0
    assert "| fast | 318 |" in capsys.readouterr().out
