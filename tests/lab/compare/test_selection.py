"""Which runs of an experiment may be compared, and why the others may not."""

import shutil
from pathlib import Path

import pytest
from support.experiments import fids, record, write_run

from lit_diffusion.lab.compare.run_folders import Run, collect_runs, most_frequent_metric, select


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for arm, speed in (("baseline", 1.0), ("clts", 1.3)):
        write_seeds(root, arm, range(2), speed)
    return root


@pytest.fixture(autouse=True)
def _copy(sweep, folder):
    shutil.copytree(sweep, "sweep")


def write_seeds(folder, arm, seeds, speed, **protocol):
    for seed in seeds:
        write_run(Path(folder, arm, f"seed-{seed}"), fids(speed, seed), seed, lr=speed, **protocol)


def selected(**options):
    return select(collect_runs(["sweep"]), **options)


def left_out(selection):
    return dict(selection.left_out)


def write(path, values=None, **options):
    seed = int(path.rpartition("-")[2])
    return write_run(Path("sweep", path), values or fids(1.0, path), seed, **{"lr": 1.3} | options)


def test_runs_of_equal_protocol_are_arms():
    selection = selected()
    assert (selection.metric, selection.baseline) == ("val/fid_360", "baseline")
    assert {arm: [str(run.path) for run in runs] for arm, runs in selection.arms.items()} == {
        arm: [f"sweep/{arm}/seed-{seed}" for seed in range(2)] for arm in ("baseline", "clts")
    }
    assert selection.left_out == []


def test_the_baseline_may_be_named_and_is_else_the_first():
    assert selected(baseline="clts").baseline == "clts"
    Path("sweep/baseline").rename("sweep/plain")
    assert selected().baseline == "clts"
    with pytest.raises(ValueError, match=r"the baseline x and another arm; there are clts, plain"):
        selected(baseline="x")


# Left out, with the reason


def diverge(run, step):
    (run / "metrics.csv").write_text(f"step,train/loss\n0,1.0\n{step},nan\n")


def test_runs_that_cannot_stand_beside_the_others_are_left_out_with_the_reason():
    short = fids(1.0, 7)[:9]
    (write("clts/seed-2") / "evaluations.jsonl").unlink()
    run = write("clts/seed-3")
    (run / "evaluations.jsonl").unlink()
    diverge(run, 50)
    write("clts/seed-4", metric="val/fid_5k")
    (write("clts/seed-5", short) / "config.yaml").unlink()
    write("md/seed-6", short, max_steps=2000)
    diverge(write("lost/seed-7", short, max_steps=2000), 950)
    Path("sweep/dead/seed-0").mkdir(parents=True)
    Path("sweep/dead/seed-0/config.yaml").write_text("{}")
    selection = selected()
    assert left_out(selection) == {
        "sweep/clts/seed-2": "it has no FID; metrics.csv ends at step 1999",
        "sweep/clts/seed-3": ("its training diverged before its first FID, which flatters its arm"),
        "sweep/clts/seed-4": "it has no val/fid_360, but val/fid_5k",
        "sweep/clts/seed-5": "cut short: its FIDs end at step 900, its arm's at 2,000",
        "sweep/dead/seed-0": "it has no FID",
        "sweep/md/seed-6": "cut short: its FIDs end at step 900 of 2,000",
    }
    assert {arm: len(runs) for arm, runs in selection.arms.items()} == {
        "baseline": 2, "clts": 2, "lost": 1
    }  # fmt: skip


def test_a_run_of_another_protocol_is_left_out_with_what_differs():
    changes = {"num_real": 9, "num_fake": 9, "data": "0", "protocol": "x", "extractor_sha256": "1"}
    changes |= {"resize": "bilinear", "weights": "raw", "labels": None}
    write("clts/seed-7", **changes)
    selection = selected()
    why = left_out(selection)["sweep/clts/seed-7"]
    assert why.startswith("its FID is of another protocol than sweep/baseline/seed-0's: ")
    assert all(f"{field} {value!r}, not " in why for field, value in changes.items())
    assert len(selection.arms["clts"]) == 2


def test_the_protocol_is_that_of_most_runs_of_the_baseline():
    write_seeds("many", "baseline", range(1), 1.0, resize="other")
    write_seeds("many", "baseline", range(1, 4), 1.0)
    write_seeds("many", "clts", range(2), 1.3)
    selection = select(collect_runs(["many"]))
    assert left_out(selection) == {
        "many/baseline/seed-0": (
            "its FID is of another protocol than many/baseline/seed-1's: resize 'other', not 'none'"
        )
    }
    assert [len(runs) for runs in selection.arms.values()] == [3, 2]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"sampling": {"solver": "DDPM()", "steps": 20}}, "solver 'DDPM()', not 'DPMSolverPP("),
        ({"sampling": {"steps": 250}}, "steps 250, not 20"),
        ({"ema_decay": 0.5}, "ema_decay 0.5, not 0.9"),
    ],
)
def test_a_seed_that_is_sampled_otherwise_than_most_of_its_arm_is_left_out(changes, difference):
    usual = {"ema_decay": 0.9}
    write_seeds("mixed", "baseline", range(2), 1.0, **usual)
    write_seeds("mixed", "clts", range(1), 1.3, **usual | changes)
    write_seeds("mixed", "clts", range(1, 4), 1.3, **usual)
    ((run, why),) = select(collect_runs(["mixed"])).left_out
    assert run == "mixed/clts/seed-0"
    assert why.startswith("its samples are drawn otherwise than those of mixed/clts/seed-1: ")
    assert difference in why


def test_records_that_do_not_tell_the_decay_may_stand_beside_those_that_do():
    write_seeds("mixed", "baseline", range(2), 1.0, ema_decay=0.9)
    write_seeds("mixed", "clts", range(2), 1.3)
    path = Path("mixed/clts/seed-0/evaluations.jsonl")
    path.write_text(path.read_text().replace('"ema_decay": null, ', ""))
    path = Path("mixed/clts/seed-1/evaluations.jsonl")
    path.write_text(path.read_text().replace('"ema_decay": null', '"ema_decay": 0.9'))
    assert select(collect_runs(["mixed"])).left_out == []


@pytest.mark.parametrize(("max_steps", "is_whole"), [(2000, True), (2099, True), (2100, False)])
def test_a_run_is_whole_when_no_further_fid_was_due(max_steps, is_whole):
    write("md/seed-7", max_steps=max_steps)
    assert ("md" in selected().arms) is is_whole


# Refused


def test_protocols_that_leave_nothing_to_compare_are_refused_with_what_differs():
    write_run(Path("two/a"), [3.0], steps=(100,))
    write_run(Path("two/b"), [3.0], steps=(100,), num_real=99)
    message = r"there are a\.\n  two/b: .*num_real 99, not 360"
    with pytest.raises(ValueError, match=message):
        select(collect_runs(["two"]))


def test_a_baseline_of_which_no_run_is_left_is_refused():
    for run in Path("sweep/baseline").iterdir():
        lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
        (run / "evaluations.jsonl").write_text("".join(lines[:3]))
    write("md/seed-7")
    with pytest.raises(
        ValueError, match=r"needs the baseline baseline .*are clts, md\.\n.*cut short"
    ):
        selected()


def test_one_seed_twice_is_refused_as_it_would_count_as_two():
    write_run(Path("sweep/clts/seed-9"), fids(1.3, 1), seed=1, lr=1.3)
    with pytest.raises(ValueError, match=r"arm clts holds seed 1 twice: .*seed-1 and .*seed-9"):
        selected()


def test_seeds_of_an_arm_that_are_configured_otherwise_are_refused_by_name():
    write("clts/seed-7", lr=0.5)
    with pytest.raises(
        ValueError, match=r"of arm clts and differ in model\.optimizer\.lr 1\.3 and"
    ):
        selected()


def test_runs_of_one_arm_in_one_place_need_no_config():
    for config in Path("sweep").rglob("config.yaml"):
        config.unlink()
    assert len(selected().arms["clts"]) == 2


# Which FID


def test_the_metric_that_most_runs_have_is_taken_before_that_on_test_data():
    runs = collect_runs(["sweep"])
    assert most_frequent_metric(runs) == "val/fid_360"
    for run in runs:
        run.records.append(record(2000, 3.0, metric="test/fid_360"))
    assert most_frequent_metric(runs) == "val/fid_360"


def test_a_metric_is_an_fid_by_its_whole_name():
    records = [{"metric": name} for name in ("val/fid_360", "fid_5k", "val/confid_1", "confidence")]
    assert Run(Path("a"), "a", "0", records=records).fid_metrics == ["val/fid_360", "fid_5k"]


def test_several_metrics_are_for_the_user_to_choose():
    runs = collect_runs(["sweep"])
    for run in runs:
        run.records.append(record(2000, 3.0, metric="val/fid_360_raw"))
    with pytest.raises(ValueError, match="choose --metric val/fid_360 or val/fid_360_raw"):
        most_frequent_metric(runs)
    assert select(runs, metric="val/fid_360").metric == "val/fid_360"


def test_runs_without_any_fid_are_told_what_makes_one():
    Path("bare/a").mkdir(parents=True)
    Path("bare/a/metrics.csv").write_text("step,loss\n1,0.5\n")
    with pytest.raises(ValueError, match=r"none of these runs has an FID.*FIDEvaluation"):
        select(collect_runs(["bare"]))
    with pytest.raises(
        ValueError, match=r"none of these runs can .*no val/fid_9k, but val/fid_360"
    ):
        selected(metric="val/fid_9k")


def test_runs_of_which_none_can_be_read_are_refused():
    for path in Path("sweep").rglob("evaluations.jsonl"):
        path.write_text("[1\n")
    with pytest.raises(
        ValueError, match=r"none of these runs can be compared\. The first: sweep/base"
    ):
        selected()
