import json
from pathlib import Path

import pytest
import yaml
from support.experiments import record, write_grid, write_run
from support.tiny_run import tiny_config

from lit_diffusion.lab.compare.found_runs import (
    PROTOCOL,
    Run,
    find_runs,
    flat,
    settings_that_differ,
)
from lit_diffusion.metrics.evaluation_record import FIDRecord

pytestmark = pytest.mark.usefixtures("folder")


def write_records(path, *records):
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "evaluations.jsonl").write_text(lines)
    return Run(folder)


# Arms and seeds


@pytest.mark.parametrize(
    ("path", "arm", "seed"),
    [
        ("sweep/clts/seed-3", "clts", "3"),
        ("sweep/md+clts/seed_12", "md+clts", "12"),
        ("runs/clts-seed3", "clts", "3"),
        ("runs/clts_seed-3", "clts", "3"),
        ("runs/lr-1e-3-seed0", "lr-1e-3", "0"),
        ("runs/clts", "clts", "clts"),
        ("runs/seedling", "seedling", "seedling"),
    ],
)
def test_arm_and_seed_are_told_by_the_name_of_the_folder(path, arm, seed):
    run = Run(Path(path))
    assert (run.arm, run.seed) == (arm, seed)


def test_a_run_folder_may_be_named_from_inside(folder, monkeypatch):
    run = write_run(folder / "clts" / "seed-4", [3.0], 4, steps=(100,))
    monkeypatch.chdir(run)
    assert (Run(Path(".")).arm, Run(Path(".")).seed) == ("clts", "4")


def test_the_config_knows_the_seed_better_than_the_name(folder):
    assert Run(write_run(folder / "a-seed7", [3.0], seed=2, steps=(100,))).seed == "2"


def test_runs_are_found_below_what_is_given_each_once(folder):
    for path in ("sweep/a/seed-0", "sweep/a/seed-1", "sweep/b/seed-0", "alone"):
        write_run(folder / path, [3.0], steps=(100,))
    (folder / "sweep" / "report").mkdir()
    found = find_runs(["sweep", "alone", "sweep/b"])
    assert [str(run.path) for run in found] == [
        *("sweep/a/seed-0", "sweep/a/seed-1", "sweep/b/seed-0", "alone")
    ]


def test_a_config_beside_run_folders_makes_no_run_of_the_folder_around_them(folder):
    write_run(folder / "sweep/a/seed-0", [3.0], steps=(100,))
    Path("sweep/config.yaml").write_text("{}")
    assert [str(run.path) for run in find_runs(["sweep"])] == ["sweep/a/seed-0"]


def test_a_run_that_wrote_its_config_only_is_found():
    Path("a").mkdir()
    Path("a/config.yaml").write_text("{}")
    assert [str(run.path) for run in find_runs(["a"])] == ["a"]


def test_links_to_folders_around_them_end_nowhere(folder):
    """Each of twelve leads to all: without a look at where they lead, there is no end of paths."""
    write_run(folder / "sweep" / "a" / "seed-0", [3.0], 0, steps=(100,))
    for n in range(12):
        (folder / "sweep" / f"link-{n}").symlink_to(folder / "sweep")
    assert [str(run.path) for run in find_runs(["sweep"])] == ["sweep/a/seed-0"]


def test_what_is_not_there_or_holds_no_run_is_told():
    with pytest.raises(FileNotFoundError, match="no run folder nowhere"):
        find_runs(["nowhere"])
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no run"):
        find_runs(["empty"])


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


def test_an_evaluation_that_was_made_otherwise_is_no_point_of_the_curve():
    run = write_records(
        "a", record(100, 5.0), record(200, 4.0), record(200, 9.0, sampling={"steps": 2})
    )
    assert [p["value"] for p in run.points("val/fid_360")] == [5.0, 4.0]
    assert run.ignored("val/fid_360") == 1
    assert run.ignored("val/other") == 0


def test_a_step_that_was_scored_again_has_its_last_score():
    run = write_records("a", record(100, 5.0), record(100, 4.5))
    assert [p["value"] for p in run.points("val/fid_360")] == [4.5]


def test_logs_config_and_grids_are_read(folder):
    path = write_run(folder / "a", [5.0, 4.0], seed=3, steps=(100, 200), max_steps=250)
    write_grid(path, 200, 128)
    run = Run(path)
    assert run.last_logged["step"] == "199"
    assert (run.max_steps, run.seed) == (250, "3")
    assert list(run.grids) == [(200, "ema")]


def test_the_latest_config_counts_and_the_first_is_known(folder):
    path = write_run(folder / "a", [5.0], steps=(100,))
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["trainer"]["max_steps"] = 900
    (path / "config.resume-1.yaml").write_text(yaml.safe_dump(config))
    run = Run(path)
    assert run.max_steps == 900
    assert settings_that_differ(run.first_config, run.config) == {"trainer.max_steps": (100, 900)}


def test_an_empty_folder_has_nothing_and_says_so():
    run = Run(Path("a"))
    assert (run.config, run.records, run.grids, run.max_steps) == ({}, [], {}, None)


def test_files_that_are_broken_are_named():
    Path("a").mkdir()
    Path("a/evaluations.jsonl").write_text("{'step'\n")
    with pytest.raises(ValueError, match=r"a/evaluations\.jsonl is broken"):
        _ = Run(Path("a")).records
    Path("a/config.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match=r"a/config\.yaml is not YAML: "):
        _ = Run(Path("a")).config


@pytest.mark.parametrize("line", ["[1]", '{"metric": "val/fid_360", "step": 100}'])
def test_lines_that_are_no_evaluations_are_named(line):
    Path("a").mkdir()
    Path("a/evaluations.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"a/evaluations\.jsonl is broken: .* is no evaluation"):
        _ = Run(Path("a")).records


def test_a_config_of_something_else_has_no_length():
    Path("a").mkdir()
    Path("a/config.yaml").write_text("trainer: 3\n")
    assert Run(Path("a")).max_steps is None


def test_fields_of_the_protocol_are_fields_of_the_record():
    assert set(PROTOCOL) <= set(FIDRecord.__dataclass_fields__)


# Settings


def test_objects_in_lists_are_named_by_their_class():
    config = {"trainer": {"callbacks": [{"class_path": "x.EMA", "init_args": {"decays": [0.9]}}]}}
    assert flat(config) == {
        "trainer.callbacks.EMA": "EMA",
        "trainer.callbacks.EMA.decays": [0.9],
    }


def test_two_objects_of_one_class_are_two_settings():
    ema = {"class_path": "x.EMA", "init_args": {"decays": [0.9]}}
    other = {"class_path": "x.EMA", "init_args": {"decays": [0.8]}}
    assert flat({"callbacks": [ema, other]}) != flat({"callbacks": [other, other]})
    assert len(flat({"callbacks": [ema, other]})) == 4


def test_configs_that_differ_in_seed_and_paths_do_not_differ():
    one = tiny_config(default_root_dir="a") | {"seed_everything": 0, "ckpt_path": None}
    two = tiny_config(default_root_dir="b") | {"seed_everything": 1, "ckpt_path": "last"}
    assert settings_that_differ(one, two) == {}


def test_differences_name_settings_with_both_values():
    one, two = tiny_config(), tiny_config(callbacks=[{"class_path": "x.EMA"}])
    two["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.2
    assert settings_that_differ(one, two) == {
        "model.optimizer.lr": (0.1, 0.2),
        "trainer.callbacks.EMA": (None, "EMA"),
    }


def test_where_a_run_is_logged_makes_no_difference():
    one, other = ({"trainer": {"logger": {"init_args": {"id": name}}}} for name in "ab")
    assert settings_that_differ(one, other) == {}
