"""What a report shows of run folders besides their curves."""

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from support.experiments import STEPS, fids, record, write_arm, write_run

from lit_diffusion.lab.compare.run_folders import collect_runs, read_run, select
from lit_diffusion.lab.compare.run_tables import (
    arms_of,
    best_widths,
    notes_on_runs,
    training_table,
    widths_table,
)
from lit_diffusion.metrics.evaluation_record import EMA_CURVE

SAMPLING = {"solver": "DPMSolverPP(steps=20)", "steps": 20}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two arms of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    write_arm(folder / "baseline", 1.0, range(2))
    write_arm(folder / "clts", 1.3, range(2), lr=0.5)
    return folder


@pytest.fixture(autouse=True)
def _copy(sweep, folder):
    shutil.copytree(sweep, "sweep")


def selected(baseline=None):
    selection = select(collect_runs(["sweep"]), baseline)
    return selection, arms_of(selection)


def notes():
    return "\n".join(notes_on_runs(*selected()))


def change(run, **changes):
    """Change every record of a run."""
    path = Path(run) / "evaluations.jsonl"
    records = [json.loads(line) | changes for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def change_config(run, **changes):
    config = yaml.safe_load((Path(run) / "config.yaml").read_text())
    (Path(run) / "config.yaml").write_text(yaml.safe_dump(config | changes))


def test_curves_have_steps_fids_images_and_repeats_of_the_records():
    curve = read_run(Path("sweep/clts/seed-1")).curve("val/fid_360")
    assert (curve.seed, curve.steps, list(curve.fids)) == ("1", STEPS, fids(1.3, 1))
    assert curve.images == tuple(64 * step for step in STEPS)
    assert len(curve.repeats) == 2
    assert curve.fids[-1] not in curve.repeats
    change("sweep/clts/seed-1", images=None)
    assert read_run(Path("sweep/clts/seed-1")).curve("val/fid_360").images is None


def test_fids_that_are_not_finite_or_after_the_training_diverged_are_nan_and_noted():
    values = [*fids(1.0, 9)]
    values[3] = values[5] = None
    write_run(Path("sweep/clts/seed-8"), values, 8, lr=0.5)
    run = write_run(Path("sweep/clts/seed-9"), fids(9.0, 9)[:7], 9, lr=0.5, max_steps=2000)
    log_losses(run, [1.0, math.nan], every=400)
    selection, arms = selected()
    *_, lost, diverged = arms[1].curves
    assert [math.isnan(fid) for fid in lost.fids] == [value is None for value in values]
    assert diverged.steps == STEPS
    assert diverged.images == tuple(64 * step for step in STEPS)
    assert [math.isfinite(fid) for fid in diverged.fids] == [True] * 7 + [False] * 13
    lost_note, diverged_note = notes_on_runs(selection, arms)
    assert lost_note == "sweep/clts/seed-8: the FID is not finite at step 400, 600."
    assert diverged_note.startswith("sweep/clts/seed-9: its training diverged")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"value": -1e-9}, "FIDs must be > 0, got -1e-09"), ({"images": [1]}, "float() argument")],
)
def test_a_run_with_a_number_that_can_not_be_takes_no_part(changes, why):
    change("sweep/clts/seed-1", **changes)
    selection, arms = selected()
    assert [len(arm.curves) for arm in arms] == [2, 1]
    ((run, reason),) = selection.left_out
    assert run.endswith("clts/seed-1")
    assert why in reason


def test_what_arms_were_tuned_on_and_their_lengths_are_noted():
    assert notes() == ""
    for run in Path("sweep/clts").iterdir():
        change_config(run, tuned_on="patches-cnn")
        change(run, sampling=None)  # not recorded, so not another way to sample
    write_run(Path("sweep/short"), fids(1.0, 9)[:9], 9, steps=STEPS[:9])
    tuned, lengths = notes().splitlines()
    assert tuned == "Tuned: clts on patches-cnn. FID here is by digits-cnn, val."
    assert lengths.startswith("baseline was trained for 2,000 steps, but short for 900.")


@pytest.mark.parametrize(("way", "is_sampler"), [({}, False), ({"steps": 1}, True)])
def test_another_way_to_sample_is_noted_and_whether_a_gain_may_be_due_to_it(way, is_sampler):
    way = {"process": "EDMProcess()"} | way
    for name, changes in (("baseline", {}), ("clts", way)):
        for run in Path("sweep", name).iterdir():
            change(run, sampling=SAMPLING | {"process": "VP()"} | changes)
    text = notes()
    assert "clts draws its samples in another way than baseline" in text
    assert all(f"{key} {value}, not " in text for key, value in way.items())
    assert ("may come from the sampler" in text) is is_sampler


def test_a_resume_with_other_settings_is_noted():
    run = Path("sweep/clts/seed-1")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.resume-1.yaml").write_text(yaml.safe_dump(config | {"ckpt_path": "last"}))
    assert notes() == ""
    change_config(run, trainer=config["trainer"] | {"max_steps": 500})
    assert "was resumed with other settings: trainer.max_steps 500, then 2000." in notes()


def log_losses(run, losses, every=20):
    """Overwrite metrics.csv."""
    Path(run).mkdir(parents=True, exist_ok=True)
    (Path(run) / "config.yaml").touch()
    lines = [f"{every * (k + 1) - 1},{loss}\n" for k, loss in enumerate(losses)]
    (Path(run) / "metrics.csv").write_text("step,train/loss\n" + "".join(lines))


def test_runs_whose_training_diverged_or_spiked_are_counted_once_also_without_any_fid():
    calm = [1.0] * 40
    assert training_table(collect_runs(["sweep"])) is None
    log_losses("sweep/baseline/seed-0", calm, every=1)
    log_losses("sweep/baseline/seed-1", [*calm, 5.0, *calm, 5.0, *calm])
    log_losses("sweep/clts/seed-0", [*calm, 5.0, *calm, math.nan])
    log_losses("sweep/clts/seed-1", [*calm, math.inf])
    log_losses("sweep/dead/seed-0", [*calm, 9.0, math.nan])
    table = training_table(collect_runs(["sweep"]))
    assert table.rows == (
        ("baseline", "2", "0", "1", "1 of 2"),
        ("clts", "2", "2", "0", "2 of 2"),
        ("dead", "1", "1", "0", "1 of 1"),
    )
    assert "every 1 or 20 steps" in table.caption


WIDTHS = {
    "baseline": [{0.05: 2.0, 0.1: 1.0}, {0.05: 2.2, 0.1: 1.1}, {0.05: 2.1, 0.1: 1.05}],
    "fast": [{0.05: 0.5, 0.1: 0.9}, {0.05: 0.55, 0.1: 0.9}, {0.05: 0.6, 0.1: 0.9}],
}


def write_widths(run, scores, step=2000, **changes):
    lines = [record(step, v, weights=f"power_{w:g}", **changes) for w, v in scores.items()]
    with (run / EMA_CURVE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def scored():
    assert widths_table(selected()[0]) == (None, [])
    shutil.rmtree("sweep")
    for k, (arm, scores) in enumerate(WIDTHS.items()):
        for seed in range(3):
            run = write_run(Path(f"sweep/{arm}/seed-{seed}"), fids(1.0, seed), seed, lr=1.0 + k)
            write_widths(run, scores[seed])


def test_each_seed_is_scored_at_the_width_that_the_others_choose():
    lucky = [{0.05: 1.0, 0.1: 2.0}, {0.05: 3.0, 0.1: 2.0}, {0.05: 3.0, 0.1: 2.0, 0.2: 0.1}]
    assert best_widths(lucky) == [(0.1, 2.0), (0.05, 3.0), (0.05, 3.0)]  # not all have 0.2
    assert best_widths(lucky[:1]) == [(0.05, 1.0)]


def test_arms_are_compared_at_their_own_widths(scored):
    table, notes = widths_table(selected()[0])
    means = [math.prod(values) ** (1 / 3) for values in ((1.0, 1.1, 1.05), (0.5, 0.55, 0.6))]
    base, fast = table.rows
    assert base[:5] == ("baseline", "0.1", "0.05, 0.1", "3", f"{means[0]:.2f}")
    assert fast[:2] == ("fast", "0.05")
    assert fast[4:] == (f"{means[1]:.3f}", f"{means[1] / means[0]:.2f}", "0.002")
    assert notes == []


def test_an_arm_that_was_scored_otherwise_takes_no_part_and_is_noted(scored):
    (Path("sweep/fast/seed-1") / EMA_CURVE).unlink()
    write_widths(Path("sweep/fast/seed-1"), WIDTHS["fast"][1], data="0" * 16)
    table, (note,) = widths_table(selected()[0])
    assert table is None
    assert note.endswith(": fast.")
