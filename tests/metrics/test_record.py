import json

import pytest

from lit_diffusion.metrics.record import (
    FIDRecord,
    finite_or_none,
    is_repeat,
    write_evaluation,
)


def record(**changes):
    values = {
        "metric": "val/fid_360",
        "value": 4.5,
        "step": 100,
        "images": 6400,
        "num_fake": 360,
        "num_real": 360,
        "reference": "val",
        "data": "0123456789abcdef",
        "protocol": "digits-cnn",
        "extractor_sha256": "0" * 64,
        "resize": "none",
        "weights": "ema",
        "ema_decay": 0.99,
        "seeds": (0, 360),
        "labels": "seed % 10",
        "sampling": {"solver": "DDIM", "steps": 20},
        "floor": 0.4,
        "floor_images": "360 train images against val",
        "non_finite": 0,
        "non_finite_seeds": [],
        "seconds": {"total": 1.0},
    }
    return FIDRecord(**(values | changes))


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines(path):
    return [strict(line) for line in path.read_text().splitlines()]


def test_evaluations_are_appended_one_line_each(tmp_path):
    path = tmp_path / "run" / "evaluations.jsonl"
    for step in (100, 200, 300):
        write_evaluation(path, record(step=step))
    assert [line["step"] for line in lines(path)] == [100, 200, 300]
    assert lines(path)[0]["sampling"] == {"solver": "DDIM", "steps": 20}


def test_a_step_that_is_scored_again_replaces_its_own_metric_only(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    write_evaluation(path, record(step=100, value=9.0))
    write_evaluation(path, record(step=100, value=8.0, metric="val/fid_360_raw"))
    write_evaluation(path, record(step=100, value=7.0))
    assert sorted(line["value"] for line in lines(path)) == [7.0, 8.0]


@pytest.mark.parametrize(
    "otherwise",
    [
        {"sampling": {"solver": "DDIM", "steps": 50}},
        {"extractor_sha256": "1" * 64},
        {"protocol": "patches-cnn"},
        {"resize": "bicubic"},
        {"data": "fedcba9876543210"},
        {"reference": "train"},
        {"seeds": (360, 720)},
        {"labels": None},
        {"weights": "raw"},
        {"ema_decay": 0.5},
        {"num_fake": 361},
        {"num_real": 100},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_that_is_measured_otherwise_destroys_no_number(tmp_path, otherwise):
    path = tmp_path / "evaluations.jsonl"
    write_evaluation(path, record(value=9.0))
    write_evaluation(path, record(value=8.0, **otherwise))
    write_evaluation(path, record(value=7.0, floor=0.5, seconds={"total": 2.0}))
    assert [line["value"] for line in lines(path)] == [7.0, 8.0]


def test_a_line_that_is_measured_again_keeps_its_place_and_its_images(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    for step in (100, 200, 300):
        write_evaluation(path, record(step=step, images=64 * step))
    write_evaluation(path, record(step=200, images=None, value=4.0))
    found = [(line["step"], line["images"], line["value"]) for line in lines(path)]
    assert found == [(100, 6400, 4.5), (200, 12800, 4.0), (300, 19200, 4.5)]
    write_evaluation(path, record(step=200, images=99))
    assert lines(path)[1]["images"] == 99


def test_a_line_of_an_earlier_version_is_superseded_not_doubled(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    write_evaluation(path, record())
    (old,) = lines(path)
    del old["ema_decay"], old["floor_sd"]
    path.write_text(json.dumps(old) + "\n")
    write_evaluation(path, record(images=None, ema_decay=0.99, floor_sd=0.1))
    (found,) = lines(path)
    assert (found["images"], found["ema_decay"], found["floor_sd"]) == (6400, 0.99, 0.1)


def test_lines_of_others_are_kept(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    path.write_text('{"command": "evaluate"}\n')
    write_evaluation(path, record())
    assert lines(path)[0] == {"command": "evaluate"}


def test_nan_is_null_as_json_has_none(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    write_evaluation(path, record(value=finite_or_none(float("nan")), non_finite=3))
    assert lines(path)[0]["value"] is None


def test_a_measurement_with_other_samples_is_a_repeat_and_stands_beside_the_first(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    write_evaluation(path, record())
    write_evaluation(path, record(seeds=(360, 720), value=4.7))
    assert [is_repeat(line) for line in lines(path)] == [False, True]
    assert not is_repeat({"step": 3})
