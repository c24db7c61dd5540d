import json
from pathlib import Path

import pytest
import yaml
from support.experiments import record, write_grid, write_run
from support.tiny_run import tiny_config

from lit_diffusion.lab.compare.run_folders import (
    PROTOCOL,
    Run,
    collect_runs,
    differing_settings,
    flatten_config,
    read_run,
    select,
)
from lit_diffusion.metrics.evaluation_record import FIDRecord

pytestmark = pytest.mark.usefixtures("folder")


def write_records(path, *records):
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "evaluations.jsonl").write_text(lines)
    return read_run(folder)


# Arms and seeds


@pytest.mark.parametrize(
    ("path", "arm", "seed"),
    [
        ("sweep/clts/seed-3", "clts", "3"),
        ("sweep/md+clts/seed_12", "md+clts", "12"),
        ("runs/lr-1e-3-seed0", "lr-1e-3", "0"),
        ("runs/seedling", "seedling", "seedling"),
    ],
)
def test_arm_and_seed_are_read_from_the_name_of_the_folder(path, arm, seed):
    run = read_run(Path(path))
    assert (run.arm, run.seed) == (arm, seed)


def test_a_run_folder_may_be_named_from_inside_and_its_config_knows_the_seed_better(
    folder, monkeypatch
):
    monkeypatch.chdir(write_run(folder / "clts" / "seed-4", [3.0], 2, steps=(100,)))
    assert (read_run(Path(".")).arm, read_run(Path(".")).seed) == ("clts", "2")


def test_runs_below_the_named_folders_are_read_each_once(folder):
    for path in ("sweep/a/seed-0", "sweep/a/seed-1", "sweep/b/seed-0", "alone"):
        write_run(folder / path, [3.0], steps=(100,))
    (folder / "sweep" / "report").mkdir()
    Path("a").mkdir()
    Path("a/config.yaml").write_text("{}")
    runs = collect_runs(["sweep", "alone", "sweep/b", "a"])
    assert [str(run.path) for run in runs] == [
        *("sweep/a/seed-0", "sweep/a/seed-1", "sweep/b/seed-0", "alone", "a")
    ]


def test_links_to_folders_around_them_end_nowhere(folder):
    """Each of twelve leads to all: without a look at where they lead, there is no end of paths."""
    write_run(folder / "sweep" / "a" / "seed-0", [3.0], 0, steps=(100,))
    for n in range(12):
        (folder / "sweep" / f"link-{n}").symlink_to(folder / "sweep")
    assert [str(run.path) for run in collect_runs(["sweep"])] == ["sweep/a/seed-0"]


def test_a_folder_without_runs_is_refused():
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no run"):
        collect_runs(["empty"])


# What a run folder holds


def test_a_curve_has_the_points_of_its_metric_in_order_and_no_repeats():
    run = write_records(
        "a",
        record(200, 4.0),
        record(100, 5.0),
        record(100, 7.0, metric="test/fid_360"),
        record(200, 4.2, seeds=(360, 720)),
    )
    assert [(p["step"], p["value"]) for p in run.points("val/fid_360")] == [(100, 5.0), (200, 4.0)]
    assert run.points("val/fid_5k") == []


def test_repeats_are_those_of_the_same_weights_measured_alike():
    last = record(200, 4.0)
    run = write_records(
        "a",
        last,
        record(100, 5.1, seeds=(360, 720)),
        record(200, 4.2, seeds=(360, 720)),
        record(200, 4.3, seeds=(720, 1080)),
        record(200, 9.9, seeds=(720, 1080), sampling={"steps": 2}),
    )
    assert [r["value"] for r in run.repeats(last)] == [4.2, 4.3]


def test_of_a_step_the_last_score_counts_that_was_measured_as_most_were():
    other = record(200, 9.0, sampling={"steps": 2})
    run = write_records("a", record(100, 5.0), record(100, 4.5), record(200, 4.0), other)
    assert [p["value"] for p in run.points("val/fid_360")] == [4.5, 4.0]


def test_logs_config_and_grids_are_read(folder):
    path = write_run(folder / "a", [5.0, 4.0], seed=3, steps=(100, 200), max_steps=250)
    write_grid(path, 200, 128)
    run = read_run(path)
    assert run.rows[-1]["step"] == "199"
    assert (run.max_steps, run.seed) == (250, "3")
    assert list(run.grids) == [(200, "ema")]


def test_the_latest_config_counts_and_the_first_is_known(folder):
    path = write_run(folder / "a", [5.0], steps=(100,))
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["trainer"]["max_steps"] = 900
    (path / "config.resume-1.yaml").write_text(yaml.safe_dump(config))
    run = read_run(path)
    assert run.max_steps == 900
    assert differing_settings(run.first_config, run.config) == {"trainer.max_steps": (100, 900)}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("evaluations.jsonl", "{'step'\n", "a/evaluations.jsonl is damaged"),
        ("evaluations.jsonl", "[1]\n", "a/evaluations.jsonl is damaged"),
        ("evaluations.jsonl", '{"metric": "val/fid_360", "step": 1}\n', "is no evaluation"),
        ("ema-curve.jsonl", "[]\n", "a/ema-curve.jsonl is damaged"),
        ("metrics.csv", "step,train/loss\n1,abc\n", "a/metrics.csv is damaged"),
        ("config.yaml", "a: [1\n", "a/config.yaml, line 2: expected ',' or ']'"),
    ],
)
def test_a_broken_file_is_the_fault_of_its_run(file, text, fault):
    Path("a").mkdir()
    (Path("a") / file).write_text(text)
    assert fault in read_run(Path("a")).fault


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


def test_fields_of_the_protocol_are_fields_of_the_record():
    assert set(PROTOCOL) <= set(FIDRecord.__dataclass_fields__)


# Settings


def test_objects_in_lists_are_named_by_their_class_and_two_of_one_class_are_two_settings():
    first, second = ({"class_path": "x.EMA", "init_args": {"decays": [d]}} for d in (0.9, 0.8))
    assert flatten_config({"trainer": {"callbacks": [first, second]}}) == {
        "trainer.callbacks.EMA": "EMA",
        "trainer.callbacks.EMA.decays": [0.9],
        "trainer.callbacks.EMA#2": "EMA",
        "trainer.callbacks.EMA#2.decays": [0.8],
    }


def test_configs_that_differ_in_seed_paths_and_logger_do_not_differ():
    configs = [tiny_config(default_root_dir=name, logger={"id": name}) for name in "ab"]
    configs = [c | {"seed_everything": k, "ckpt_path": str(k)} for k, c in enumerate(configs)]
    assert differing_settings(*configs) == {}


def test_differences_name_settings_with_both_values():
    one, two = tiny_config(), tiny_config(callbacks=[{"class_path": "x.EMA"}])
    two["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.2
    assert differing_settings(one, two) == {
        "model.optimizer.lr": (0.1, 0.2),
        "trainer.callbacks.EMA": (None, "EMA"),
    }
