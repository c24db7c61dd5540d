"""What is read of run folders, which runs may be compared, and why the others may not."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.experiments import fids, record, write_grid, write_run
from support.tiny_run import tiny_config

from lit_diffusion.cli.loggers import AppendingCSVLogger
from lit_diffusion.lab.compare.run_folders import (
    Run,
    collect_runs,
    differing_settings,
    flatten_config,
    read_run,
    select,
)
from lit_diffusion.lab.compare.sweep import PlannedRun

pytestmark = pytest.mark.usefixtures("folder")


def write_records(path, *records):
    Path(path).mkdir()
    lines = "".join(json.dumps(r) + "\n" for r in records)
    Path(path, "evaluations.jsonl").write_text(lines)
    return read_run(Path(path))


@pytest.mark.parametrize(
    ("path", "arm", "seed"),
    [
        ("sweep/clts/seed-3", "clts", "3"),
        ("sweep/md+clts/seed_12", "md+clts", "12"),
        ("runs/seedling", "seedling", "seedling"),
    ],
)
def test_arm_and_seed_are_read_from_the_name_of_the_folder(path, arm, seed):
    run = read_run(Path(path))
    assert (run.arm, run.seed) == (arm, seed)


def test_a_curve_has_the_last_points_of_its_metric_that_were_measured_as_most_and_no_repeats():
    last = record(200, 4.0)
    run = write_records(
        "a",
        last,
        record(100, 5.0),
        record(100, 4.5),
        record(100, 7.0, metric="test/fid_360"),
        record(200, 9.0, sampling={"steps": 2}),
        record(100, 5.1, seeds=(360, 720)),
        record(200, 4.2, seeds=(360, 720)),
        record(200, 4.3, seeds=(720, 1080)),
        record(200, 9.9, seeds=(720, 1080), sampling={"steps": 2}),
    )
    assert [(p["step"], p["value"]) for p in run.points("val/fid_360")] == [(100, 4.5), (200, 4.0)]
    assert [r["value"] for r in run.repeats(last)] == [4.2, 4.3]
    assert run.points("val/fid_5k") == []


def test_rows_that_were_logged_without_a_step_are_no_points():
    logger = AppendingCSVLogger("a")
    for step, loss in ((0, 3.0), (None, 2.0), (1, 1.0)):
        logger.log_metrics({"val/loss": loss}, step=step)
    points = read_run(Path("a")).points("val/loss")
    assert [(p["step"], p["value"]) for p in points] == [(1, 3.0), (2, 1.0)]
    assert PlannedRun("a", 0, Path("a"), (), max_steps=2).completed_steps() == 2


def test_logs_grids_and_the_first_and_latest_config_are_read(folder):
    path = write_run(folder / "a", [5.0, 4.0], seed=3, steps=(100, 200), max_steps=250)
    write_grid(path, 200, 128)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["trainer"]["max_steps"] = 900
    (path / "config.resume-1.yaml").write_text(yaml.safe_dump(config))
    run = read_run(path)
    assert run.rows[-1]["step"] == "199"
    assert list(run.grids) == [(200, "ema")]
    assert (run.max_steps, run.seed) == (900, "3")
    assert differing_settings(run.first_config, run.config) == {"trainer.max_steps": (250, 900)}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("evaluations.jsonl", "{'step'\n", "a/evaluations.jsonl is damaged"),
        ("evaluations.jsonl", '{"metric": "val/fid_360", "step": 1}\n', "is not an evaluation"),
        (
            "evaluations.jsonl",
            '{"metric": "val/fid_360", "step": null, "value": 1.0}\n',
            "is not an evaluation",
        ),
        ("metrics.csv", "step,train/loss\n1,abc\n", "a/metrics.csv is damaged"),
        ("config.yaml", "a: [1\n", "a/config.yaml, line 2: expected ',' or ']'"),
    ],
)
def test_a_broken_file_is_the_fault_of_its_run(file, text, fault):
    Path("a").mkdir()
    (Path("a") / file).write_text(text)
    assert fault in read_run(Path("a")).fault


def test_objects_in_lists_are_named_by_their_class_and_two_of_one_class_are_two_settings():
    first, second = ({"class_path": "x.EMA", "init_args": {"decays": [d]}} for d in (0.9, 0.8))
    assert flatten_config({"trainer": {"callbacks": [first, second]}}) == {
        "trainer.callbacks.EMA": "EMA",
        "trainer.callbacks.EMA.decays": [0.9],
        "trainer.callbacks.EMA#2": "EMA",
        "trainer.callbacks.EMA#2.decays": [0.8],
    }


def test_differences_but_of_seed_paths_and_logger_name_settings_with_both_values():
    one, two = (tiny_config(default_root_dir=name, logger={"id": name}) for name in "ab")
    two |= {"seed_everything": 1, "ckpt_path": "last"}
    assert differing_settings(one, two) == {}
    two["trainer"]["callbacks"] = [{"class_path": "x.EMA"}]
    two["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.2
    assert differing_settings(one, two) == {
        "model.optimizer.lr": (0.1, 0.2),
        "trainer.callbacks.EMA": (None, "EMA"),
    }


# Selection of comparable runs


@pytest.fixture(scope="module")
def two_arms(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for arm, speed in (("baseline", 1.0), ("clts", 1.3)):
        write_seeds(root, arm, range(2), speed)
    return root


@pytest.fixture
def sweep(two_arms, folder):
    return Path(shutil.copytree(two_arms, "sweep"))


def write_seeds(folder, arm, seeds, speed, **protocol):
    for seed in seeds:
        write_run(Path(folder, arm, f"seed-{seed}"), fids(speed, seed), seed, lr=speed, **protocol)


def selected(**options):
    return select(collect_runs(["sweep"]), **options)


def write(path, values=None, **options):
    seed = int(path.rpartition("-")[2])
    return write_run(Path("sweep", path), values or fids(1.0, path), seed, **{"lr": 1.3} | options)


def test_runs_of_equal_protocol_are_arms_also_without_configs(sweep):
    for config in Path("sweep/clts").rglob("config.yaml"):
        config.unlink()
    selection = selected()
    assert (selection.metric, selection.baseline) == ("val/fid_360", "baseline")
    assert {arm: [str(run.path) for run in runs] for arm, runs in selection.arms.items()} == {
        arm: [f"sweep/{arm}/seed-{seed}" for seed in range(2)] for arm in ("baseline", "clts")
    }
    assert selection.left_out == []


def test_the_baseline_may_be_named_and_is_else_the_first(sweep):
    assert selected(baseline="clts").baseline == "clts"
    Path("sweep/baseline").rename("sweep/plain")
    assert selected().baseline == "clts"
    with pytest.raises(ValueError, match=r"the baseline x and another arm; there are clts, plain"):
        selected(baseline="x")


def diverge(run, step):
    (run / "metrics.csv").write_text(f"step,train/loss\n0,1.0\n{step},nan\n")


def test_runs_that_cannot_stand_beside_the_others_are_left_out_with_the_reason(sweep):
    short = fids(1.0, 7)[:9]
    (write("clts/seed-2") / "evaluations.jsonl").unlink()
    diverge(run := write("clts/seed-3"), 50)
    (run / "evaluations.jsonl").unlink()
    write("clts/seed-4", metric="val/fid_5k")
    (write("clts/seed-5", short) / "config.yaml").unlink()
    write("md/seed-6", short, max_steps=2000)
    diverge(write("lost/seed-7", short, max_steps=2000), 950)
    selection = selected()
    assert dict(selection.left_out) == {
        "sweep/clts/seed-2": "it has no FID; metrics.csv ends at step 1999",
        "sweep/clts/seed-3": "its training diverged before its first FID, so its arm "
        "looks too good",
        "sweep/clts/seed-4": "it has no val/fid_360, but val/fid_5k",
        "sweep/clts/seed-5": "cut short: its FIDs end at step 900, other seeds' at step 2,000",
        "sweep/md/seed-6": "cut short: its FIDs end at step 900 of 2,000",
    }
    lengths = {arm: len(runs) for arm, runs in selection.arms.items()}
    assert lengths == {"baseline": 2, "clts": 2, "lost": 1}


def test_a_run_of_another_protocol_is_left_out_with_what_differs(sweep):
    changes = {"num_real": 9, "num_fake": 9, "data": "0", "protocol": "x", "extractor_sha256": "1"}
    changes |= {"resize": "bilinear", "weights": "raw", "labels": None}
    write("clts/seed-7", **changes)
    ((run, why),) = selected().left_out
    assert run == "sweep/clts/seed-7"
    assert why.startswith("its FID was measured differently from that of sweep/baseline/seed-0: ")
    assert all(f"{field} {value!r}, not " in why for field, value in changes.items())


def test_the_protocol_is_that_of_most_runs_of_the_baseline(folder):
    write_seeds("many", "baseline", range(1), 1.0, resize="other")
    write_seeds("many", "baseline", range(1, 4), 1.0)
    write_seeds("many", "clts", range(2), 1.3)
    selection = select(collect_runs(["many"]))
    assert dict(selection.left_out).keys() == {"many/baseline/seed-0"}
    assert [len(runs) for runs in selection.arms.values()] == [3, 2]


def test_a_seed_that_is_sampled_otherwise_than_most_of_its_arm_is_left_out(folder):
    write_seeds("mixed", "baseline", range(2), 1.0)
    write_seeds("mixed", "clts", range(1), 1.3, sampling={"solver": "DDPM()", "steps": 20})
    write_seeds("mixed", "clts", range(1, 4), 1.3)
    ((run, why),) = select(collect_runs(["mixed"])).left_out
    assert run == "mixed/clts/seed-0"
    assert why.startswith("its samples were drawn differently from those of mixed/clts/seed-1: ")
    assert "solver 'DDPM()', not 'DPMSolverPP(" in why


@pytest.mark.parametrize(
    ("seed", "lr", "rule"),
    [
        (1, 1.3, r"arm clts has seed 1 twice: .*seed-1 and .*seed-9"),
        (9, 0.5, r"both belong to arm clts and differ in model\.optimizer\.lr 1\.3 and"),
    ],
)
def test_one_seed_twice_and_seeds_that_are_configured_otherwise_are_refused(sweep, seed, lr, rule):
    write_run(Path("sweep/clts/seed-9"), fids(1.3, 9), seed, lr=lr)
    with pytest.raises(ValueError, match=rule):
        selected()


@pytest.mark.parametrize(("steps", "batches"), [(None, 90), (1, 45), (2, 60)])
def test_rows_of_a_gan_count_its_batches(steps, batches):
    model = {"init_args": {} if steps is None else {"discriminator_steps": steps}}
    config = {"trainer": {"max_steps": 90}, "model": model}
    rows = [{"step": str(step), "val/consistency": "1"} for step in range(9, batches, 10)]
    whole = [Run(Path(arm), arm, "0", config, rows=rows) for arm in "ab"]
    cut = Run(Path("c"), "c", "0", config, rows=rows[:-2])
    selection = select([*whole, cut], metric="val/consistency")
    assert set(selection.arms) == {"a", "b"}
    assert selection.left_out[0][1].endswith(f" of {batches}")
