"""The speedrun: its rules, its targets, and a real one with two seeds."""

import csv
from pathlib import Path

import pytest
import yaml
from support.commands import call

from lit_diffusion.config.shipped import shipped_configs
from lit_diffusion.lab.compare import speedrun
from lit_diffusion.lab.compare.curves import Bound, Crossing, read_arms
from lit_diffusion.lab.compare.sweep import fit_settings

ROOT = Path(__file__).parents[3]
TRACK = str(shipped_configs() / "digits-ablation.yaml")
RECIPES = ["fast", "static", "balanced", "textbook", "edm-tuned", "decayed"]


def record(step, fid, held_out=0.1, seeds=(0, 1440)):
    others = {"held-out": held_out, "pixels": 0.1, "random-cnn": 0.01}
    return {"step": step, "value": fid, "second_look": others, "seeds": seeds, "num_fake": 1440}


def settings(*files, options=()):
    return fit_settings("arm", [TRACK, *map(str, files)], list(options))


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
    for arm in read_arms([str(ROOT / "docs/results/recipes.csv")]):
        for curve in arm.curves:
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
        ("--trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches"),
        ("--trainer.callbacks.FIDEvaluation.num_samples=100", "trainer.callbacks.FIDEvaluation"),
        ("--trainer.callbacks.FIDEvaluation=null", "trainer.callbacks.FIDEvaluation"),
    ],
)
def test_a_fixed_setting_that_was_changed_is_named(track, option, name):
    with pytest.raises(ValueError, match=f"must not change {name}; it may change the model"):
        speedrun.check_rules(settings(options=[option]), track)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.network.model_channels=40", "760,000 parameters, got 1,"),
        ("--model.solver.steps=21", "20 evaluations of the network per sample, got 21"),
    ],
)
def test_networks_and_samplers_are_bounded(option, message):
    with pytest.raises(ValueError, match=message):
        speedrun.check_network(settings(options=[option])["model"], trust=())


def test_a_record_needs_all_seeds_and_an_interval_above_one():
    def entry(name, *steps, bound=Bound.EXACT):
        steps = [Crossing(step) for step in steps[:-1]] + [Crossing(steps[-1], bound)]
        return speedrun.Entry(name, tuple(steps), None)

    old = entry("old", *range(300, 310))
    faster = speedrun.describe(entry("new", *range(200, 210)), old)
    assert "10 of 10 seeds reached the targets, after 204 steps" in faster
    assert faster.endswith("This is a new record.")
    equal = speedrun.describe(entry("new", *range(299, 309)), old)
    missing = speedrun.describe(entry("new", *range(200, 210), bound=Bound.MORE_THAN), old)
    assert equal.endswith("This is not a new record.")
    assert missing.endswith("This is not a new record.")


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
    steps = {"trainer": {"max_steps": 2, "val_check_interval": 2}}
    few = {"model": {"init_args": {"solver": {"init_args": {"steps": 1}}}}}
    Path("mine.yaml").write_text(yaml.safe_dump(steps | few))
    assert call("speedrun mine.yaml --commit abc") == 0
    out = capsys.readouterr().out
    assert "mine: 2 of 2 seeds reached the targets, after <= 2 steps" in out
    rows = list(csv.DictReader(Path("runs/speedrun-mine/speedrun.csv").read_text().splitlines()))
    assert [(row["seed"], row["step"], row["reached"]) for row in rows] == [
        ("30", "2", "1"),
        ("31", "2", "1"),
    ]
    assert {row["commit"] for row in rows} == {"abc"}
    assert call("speedrun") == 0
    assert "| fast | 318 |" in capsys.readouterr().out
