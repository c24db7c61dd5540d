import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from support.experiments import STEPS, fids, record, write_arm, write_grid, write_run

from lit_diffusion.lab.compare import findings
from lit_diffusion.lab.compare.found_runs import Run, find_runs
from lit_diffusion.lab.compare.selection import select


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_arm(Path("sweep/baseline"), 1.0)
    write_arm(Path("sweep/clts"), 1.3, lr=0.5)


SAMPLING = {"solver": "DPMSolverPP(steps=20)", "steps": 20}


def chosen():
    selection = select(find_runs(["sweep"]))
    return selection, findings.arms_of(selection)


def notes():
    return "\n".join(findings.notes(*chosen()))


def change(run, **changes):
    """Change every record of a run."""
    path = Path(run) / "evaluations.jsonl"
    records = [json.loads(line) | changes for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


# Curves


def test_curves_have_steps_fids_images_and_repeats_of_the_records():
    curve = Run(Path("sweep/clts/seed-3")).curve("val/fid_360")
    assert curve.seed == "3"
    assert curve.steps == STEPS
    assert list(curve.fids) == fids(1.3, 3)
    assert curve.images == tuple(64 * step for step in STEPS)
    assert len(curve.repeats) == 2
    assert curve.fids[-1] not in curve.repeats


def test_the_baseline_is_the_first_arm():
    Path("sweep/baseline").rename("sweep/zero")
    selection = select(find_runs(["sweep"]), baseline="zero")
    assert [arm.name for arm in findings.arms_of(selection)] == ["zero", "clts"]


def test_records_without_images_have_curves_without_them():
    change("sweep/clts/seed-3", images=None)
    assert Run(Path("sweep/clts/seed-3")).curve("val/fid_360").images is None
    assert "Images seen are not recorded in all runs" in notes()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"value": -1e-9}, "seed 3: FIDs must be > 0, got -1e-09"),
        ({"value": 0}, "seed 3: FIDs must be > 0, got 0"),
        ({"value": "good"}, "is no evaluation"),
        ({"value": 10**400}, "seed 3: int too large to convert to float"),
        ({"images": "many"}, "could not convert string to float: 'many'"),
        ({"images": [1]}, "seed 3: float() argument must be a string or a real number, not 'list'"),
        ({"images": 10**400}, "seed 3: int too large to convert to float"),
        ({"images": 64}, "seed 3: images seen must increase, got 64 after 64"),
    ],
)
def test_a_run_with_a_number_that_can_not_be_takes_no_part(changed, why):
    change("sweep/clts/seed-3", **changed)
    selection, arms = chosen()
    assert [len(arm.curves) for arm in arms] == [5, 4]
    ((run, told),) = selection.left_out
    assert run.endswith("clts/seed-3")
    assert why in told


# Alerts


def alerts():
    return findings.alerts(chosen()[0])


def test_arms_alike_in_sampling_need_no_alert():
    assert alerts() == []


@pytest.mark.parametrize(
    "way", [{"solver": "Heun()"}, {"steps": 50}, {"solver": None, "steps": 1}, {"mine": 2}]
)
def test_a_gain_that_may_be_the_samplers_is_alerted(way):
    write_arm(Path("sweep/md"), 1.1)
    for run in Path("sweep/baseline").iterdir():
        change(run, sampling=SAMPLING | {"mine": 1})
    for run in [*Path("sweep/clts").iterdir(), *Path("sweep/md").iterdir()]:
        change(run, sampling=SAMPLING | {"mine": 1} | way)
    assert [alert.partition(":")[0] for alert in alerts()] == [
        "Other samplers than baseline's in 2 arms"
    ]
    shutil.rmtree("sweep/md")
    assert [alert.partition(":")[0] for alert in alerts()] == [
        "Other samplers than baseline's in clts"
    ]


def test_what_an_arm_was_tuned_on_is_said_beside_what_its_fid_is_by():
    write_arm(Path("sweep/md"), 1.1)
    for run in [*Path("sweep/clts").iterdir(), *Path("sweep/md").iterdir()]:
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(config | {"tuned_on": "digits-cnn"}))
    assert alerts() == ["Tuned: clts, md on digits-cnn. FID here is by digits-cnn, val."]


@pytest.mark.parametrize("way", [SAMPLING | {"process": "EDMProcess()"}, {}, None])
def test_another_process_or_none_that_is_known_is_no_alert(way):
    for run in Path("sweep/clts").iterdir():
        change(run, sampling=way)
    assert alerts() == []


# Notes


def test_runs_that_are_as_they_should_be_need_one_note_only():
    assert notes() == "Every arm sees 64 images a step, so speed-ups by images are the same."


def test_runs_that_repeat_no_fid_are_told_how():
    for path in Path("sweep").glob("*/*/evaluations.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: len(STEPS)]))
    assert "no run repeats its last FID" in notes()


def test_few_seeds_are_told():
    write_arm(Path("sweep/md"), 1.1, range(2))
    assert "Fewer than 5 seeds, the least for a headline: md 2." in notes()


def test_fids_that_are_not_finite_are_told_with_run_and_step():
    values = [*fids(1.0, 9)]
    values[3] = values[5] = None
    write_run(Path("sweep/baseline/seed-9"), values, 9)
    assert "sweep/baseline/seed-9: the FID is not finite at step 400, 600." in notes()
    (curve,) = [c for c in chosen()[1][0].curves if c.seed == "9"]
    assert [math.isnan(fid) for fid in curve.fids] == [value is None for value in values]


def test_fids_of_one_step_that_differ_are_told():
    path = Path("sweep/clts/seed-3/evaluations.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps(first) + "\n")  # again, as a resume does
    assert "differ" not in notes()
    with path.open("a") as file:
        file.write(json.dumps(first | {"value": 999.0}) + "\n")
    assert "sweep/clts/seed-3: its FIDs of step 100 differ; the last one counts." in notes()


def test_scores_besides_the_fid_may_be_below_zero():
    path = Path("sweep/clts/seed-3/evaluations.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps(first | {"metric": "val/log_fid_360", "value": -1.0}) + "\n")
    assert not chosen()[0].left_out


def test_arms_of_another_length_or_with_other_evaluations_are_told():
    write_run(Path("sweep/short"), fids(1.0, 9)[:9], 9, steps=STEPS[:9])
    write_run(Path("sweep/rare"), fids(1.0, 9)[1::2], 9, steps=STEPS[1::2])
    told = notes()
    assert "Trained for another number of steps than baseline's 2,000: short for 900." in told
    assert "Evaluated at other steps than baseline, 20 times: rare 10 times." in told


def test_another_way_to_sample_is_told_with_both():
    for run in Path("sweep/clts").iterdir():
        change(run, sampling={"solver": "Heun()", "steps": 20})
    assert (
        "clts draws its samples in another way: solver Heun(), not DPMSolverPP(steps=20)."
        in notes()
    )


def test_images_a_step_that_differ_are_told():
    for seed in range(5):
        path = Path(f"sweep/clts/seed-{seed}/evaluations.jsonl")
        path.write_text(path.read_text().replace('"images": 6400,', '"images": 12800,'))
        records = [json.loads(line) for line in path.read_text().splitlines()]
        lines = (json.dumps(r | {"images": 128 * r["step"]}) for r in records)
        path.write_text("\n".join(lines) + "\n")
    assert "Images a step differ between arms: baseline 64, clts 128." in notes()


def test_evaluations_that_are_ignored_are_told():
    path = Path("sweep/clts/seed-3/evaluations.jsonl")
    path.write_text(path.read_text() + json.dumps(record(2000, 9.0, sampling={"steps": 2})) + "\n")
    assert "sweep/clts/seed-3: 1 of its evaluations" in notes()


def test_a_resume_with_other_settings_is_told():
    run = Path("sweep/clts/seed-3")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["ckpt_path"] = "last"
    (run / "config.resume-1.yaml").write_text(yaml.safe_dump(config))
    assert "resumed" not in notes()
    first = config | {"trainer": config["trainer"] | {"max_steps": 500}}
    (run / "config.yaml").write_text(yaml.safe_dump(first))
    assert "was resumed with other settings: trainer.max_steps 500, then 2000." in notes()


# Tables and facts


def test_what_an_arm_changes_is_read_from_the_configs():
    table = findings.settings_table(chosen()[0])
    assert table.rows == (("clts", "model.optimizer.lr", "0.001", "0.5"),)
    assert table.columns[2] == "baseline"


def test_arms_with_many_changes_are_cut_with_how_many_there_are():
    run = write_run(Path("sweep/other"), fids(1.0, 9), 9)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"] |= {f"setting_{k}": k for k in range(30)}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [row for row in findings.settings_table(chosen()[0]).rows if row[0] == "other"]
    assert rows[-1][1] == f"and {30 - len(rows) + 1} more"


def test_without_configs_nothing_is_said_of_settings():
    for config in Path("sweep").glob("*/*/config.yaml"):
        config.unlink()
    assert findings.settings_table(chosen()[0]) is None


def test_every_run_has_a_row_with_its_loss_and_folder():
    selection, arms = chosen()
    table = findings.runs_table(selection, arms, target=2.5)
    assert len(table.rows) == 10
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["arm"], first["seed"], first["val/loss"]) == ("baseline", "0", "0.1")
    assert first["folder"] == "sweep/baseline/seed-0"


def test_the_protocol_is_told_whole():
    facts = findings.protocol_facts(chosen()[0])
    assert facts["num_fake"] == "360"
    assert facts["protocol"] == "digits-cnn"
    assert facts["sampling solver"] == "DPMSolverPP(steps=20)"


# Samples


def test_grids_are_of_one_training_seed_and_equal_steps_of_all_arms():
    selection, _ = chosen()
    grids = findings.sample_pictures(selection, ["baseline", "clts"])
    assert [(g.arm, g.step) for g in grids] == [
        (arm, step) for arm in ("baseline", "clts") for step in (500, 1000, 2000)
    ]
    expected = Path("sweep/clts/seed-0/samples/step-00001000-ema.png").read_bytes()
    assert grids[4].png == expected


def test_grids_of_other_weights_or_steps_are_not_set_side_by_side():
    for path in Path("sweep/clts").glob("*/samples/*.png"):
        path.rename(path.with_name(path.name.replace("ema", "raw")))
    write_grid(Path("sweep/clts/seed-0"), 500, 100)
    grids = findings.sample_pictures(chosen()[0], ["baseline", "clts"])
    assert [(g.arm, g.step) for g in grids] == [("baseline", 500), ("clts", 500)]


def shown(*names):
    """Pictures of arms, and the notes on them."""
    selection, _ = chosen()
    grids = findings.sample_pictures(selection, names)
    return grids, findings.notes_on_samples(selection, grids)


def test_an_arm_without_grids_leaves_the_others_without_and_is_named():
    write_run(Path("sweep/md"), fids(1.0, 9), 9)
    assert shown("baseline", "clts", "md") == (
        [],
        ["No samples are shown, as no run of md holds pictures of them."],
    )


def test_grids_that_are_nowhere_or_as_they_should_be_need_no_note():
    assert shown("baseline", "clts")[1] == []
    for folder in Path("sweep").glob("*/*/samples"):
        shutil.rmtree(folder)
    assert shown("baseline", "clts") == ([], [])


def test_grids_without_equal_steps_are_said_to_be():
    for path in Path("sweep/clts").glob("*/samples/*.png"):
        path.rename(path.with_name("step-00000007-ema.png"))
    grids, (note,) = shown("baseline", "clts")
    assert grids == []
    assert "the arms hold none of equal steps and weights" in note


def test_grids_of_different_training_seeds_are_said_to_be():
    for seed in (0, 1, 2):
        shutil.rmtree(f"sweep/baseline/seed-{seed}/samples")
    for seed in (3, 4):
        shutil.rmtree(f"sweep/clts/seed-{seed}/samples")
    grids, told = shown("baseline", "clts")
    assert {(grid.arm, grid.seed) for grid in grids} == {("baseline", "3"), ("clts", "0")}
    assert told == [
        "The samples are of different training seeds, as the arms have none in common: "
        "baseline 3, clts 0."
    ]


def test_grids_are_of_the_weights_of_the_fid():
    for path in Path("sweep").glob("*/*/samples/*-ema.png"):
        path.with_name(path.name.replace("ema", "raw")).write_bytes(path.read_bytes())
    assert {(grid.step, grid.weights) for grid in shown("baseline", "clts")[0]} == {
        (step, "ema") for step in (500, 1000, 2000)
    }
    for path in Path("sweep").glob("*/*/samples/*-ema.png"):
        path.unlink()
    assert {grid.weights for grid in shown("baseline", "clts")[0]} == {"raw"}


# Training


def log_losses(run, losses, every=20):
    """Overwrite metrics.csv."""
    Path(run).mkdir(parents=True, exist_ok=True)
    (Path(run) / "config.yaml").touch()
    lines = [f"{every * (k + 1) - 1},{loss}\n" for k, loss in enumerate(losses)]
    (Path(run) / "metrics.csv").write_text("step,train/loss\n" + "".join(lines))


def test_runs_whose_training_diverged_are_counted_also_without_any_fid():
    calm = [1.0] * 40
    log_losses("sweep/baseline/seed-0", calm)
    log_losses("sweep/baseline/seed-1", [*calm, 5.0, *calm])
    log_losses("sweep/clts/seed-0", [*calm, math.nan])
    log_losses("sweep/dead/seed-0", [*calm, 9.0, math.nan])
    table = findings.training_table(find_runs(["sweep"]))
    assert table.rows == (
        ("baseline", "2", "0", "1", "1 of 2"),
        ("clts", "1", "1", "0", "1 of 1"),
        ("dead", "1", "1", "0", "1 of 1"),
    )
    assert "training loss of every 20th step" in table.caption
    log_losses("sweep/clts/seed-0", calm, every=1)
    found = findings.training_table(find_runs(["sweep"]))
    assert "training loss of every step or every 20th step" in found.caption


def test_a_run_that_diverged_after_a_jump_counts_once():
    calm = [1.0] * 40
    log_losses("sweep/clts/seed-0", calm)
    log_losses("sweep/clts/seed-1", [*calm, 5.0, *calm, 5.0, *calm])
    log_losses("sweep/clts/seed-2", [*calm, 5.0, *calm, math.nan])
    log_losses("sweep/clts/seed-3", [*calm, math.inf])
    table = findings.training_table(find_runs(["sweep"]))
    assert table.rows == (("clts", "4", "2", "1", "3 of 4"),)


def test_without_training_losses_nothing_is_said_about_them():
    assert findings.training_table(find_runs(["sweep"])) is None


def test_a_run_that_diverged_has_no_fid_from_then_on_and_never_reaches_the_target():
    run = write_run(Path("sweep/clts/seed-9"), fids(9.0, 9)[:7], 9, lr=0.5, max_steps=2000)
    log_losses(run, [1.0, math.nan], every=400)
    selection, arms = chosen()
    (curve,) = (curve for curve in arms[1].curves if curve.seed == "9")
    assert curve.steps == STEPS
    assert curve.images == tuple(64 * step for step in STEPS)
    assert [math.isfinite(fid) for fid in curve.fids] == [True] * 7 + [False] * 13
    assert "sweep/clts/seed-9: its training diverged, so it has no FID from then on." in notes()
    assert len(selection.arms["clts"]) == 6
