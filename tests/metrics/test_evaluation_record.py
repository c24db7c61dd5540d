import json
from types import SimpleNamespace

import pytest
from support.rising import Rising, loader, trainer

from lit_diffusion.metrics import evaluation_record
from lit_diffusion.metrics.evaluation_record import (
    EvaluationClock,
    FIDRecord,
    ImageCount,
    count_training_images,
    is_repeat,
    parse_image_count,
    write_evaluation,
)


def record(**changes):
    data = {"reference": "val", "data": "0123456789abcdef", "num_real": 360}
    extractor = {"protocol": "digits-cnn", "extractor_sha256": "0" * 64, "resize": "none"}
    samples = {"weights": "ema", "ema_decay": 0.99, "num_fake": 360, "seeds": (0, 360)}
    samples |= {"labels": "seed % 10", "sampling": {"solver": "DDIM", "steps": 20}}
    results = {"value": 4.5, "images": 6400, "floor": 0.4, "floor_images": "360 train images"}
    results |= {"non_finite": 0, "non_finite_seeds": [], "seconds": {"total": 1.0}}
    values = {"metric": "val/fid_360", "step": 100} | data | extractor | samples | results
    return FIDRecord(**(values | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "evaluations.jsonl"


def lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


OTHER = {"metric": "val/fid_360_raw", "step": 200, "sampling": {"solver": "DDIM", "steps": 50}}
OTHER |= {"extractor_sha256": "1" * 64, "protocol": "patches-cnn", "resize": "bicubic"}
OTHER |= {"data": "fedcba9876543210", "reference": "train", "seeds": (360, 720), "labels": None}
OTHER |= {"weights": "raw", "ema_decay": 0.5, "num_fake": 361, "num_real": 100}


@pytest.mark.parametrize("name", OTHER)
def test_a_step_that_is_measured_otherwise_destroys_no_number(path, name):
    write_evaluation(path, record(value=9.0))
    write_evaluation(path, record(value=8.0, **{name: OTHER[name]}))
    write_evaluation(path, record(value=7.0, floor=0.5, seconds={"total": 2.0}))
    assert [line["value"] for line in lines(path)] == [7.0, 8.0]


def test_a_line_that_is_measured_again_keeps_its_place_and_its_images(path):
    for step in (100, 200, 300):
        write_evaluation(path, record(step=step, images=64 * step))
    write_evaluation(path, record(step=200, images=None, value=4.0))
    results = [(line["step"], line["images"], line["value"]) for line in lines(path)]
    assert results == [(100, 6400, 4.5), (200, 12800, 4.0), (300, 19200, 4.5)]
    write_evaluation(path, record(step=200, images=99))
    assert lines(path)[1]["images"] == 99


def test_a_line_of_an_earlier_version_is_superseded_not_doubled(path):
    write_evaluation(path, record())
    (old,) = lines(path)
    del old["ema_decay"], old["floor_sd"]
    path.write_text(json.dumps(old) + "\n")
    write_evaluation(path, record(images=None, ema_decay=0.99, floor_sd=0.1))
    (new,) = lines(path)
    assert (new["images"], new["ema_decay"], new["floor_sd"]) == (6400, 0.99, 0.1)


def test_a_measurement_with_other_samples_is_a_repeat_and_stands_beside_the_first(path):
    write_evaluation(path, record())
    write_evaluation(path, record(seeds=(360, 720), value=4.7))
    assert [is_repeat(line) for line in lines(path)] == [False, True]
    assert not is_repeat({"step": 3})


def test_images_are_counted_by_batches_through_a_resume(tmp_path):
    options = {"accumulate_grad_batches": 3}
    first, second = (trainer(tmp_path, [], max_epochs=n, **options) for n in (2, 3))
    first.fit(Rising(), loader(12, batch_size=2))
    assert count_training_images(first) == 24
    first.save_checkpoint(tmp_path / "c.ckpt")
    second.fit(Rising(), loader(12, batch_size=2), ckpt_path=tmp_path / "c.ckpt")
    assert count_training_images(second) == 36


@pytest.mark.parametrize(("limit", "images"), [(1.0, 10), (2, 8)])
def test_the_last_batch_of_an_epoch_counts_the_images_that_it_has(tmp_path, limit, images):
    options = {"limit_train_batches": limit}
    first, second = (trainer(tmp_path, [], max_epochs=n, **options) for n in (2, 3))
    first.fit(Rising(), loader(10, batch_size=4))
    assert count_training_images(first) == 2 * images
    first.save_checkpoint(tmp_path / "c.ckpt")
    second.fit(Rising(), loader(10, batch_size=4), ckpt_path=tmp_path / "c.ckpt")
    assert count_training_images(second) == 3 * images


def test_the_clock_estimates_after_one_batch_and_reports_progress(caplog, monkeypatch):
    caplog.set_level("INFO")
    now = [100]
    monkeypatch.setattr(evaluation_record, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = EvaluationClock("val/fid_40", total=40, interval=5)
    for _ in range(4):
        with clock.phase("generate"):
            now[0] += 6
        clock.tick(10)
    assert clock.seconds() == {"generate": 24, "total": 24, "estimated": 24}
    assert "40 samples take about" in caplog.text
    assert "20 of 40" in caplog.text


def test_a_count_is_parsed_as_a_checkpoint_holds_it():
    assert parse_image_count([100, 7, None]) == ImageCount(100, 7, None)
    assert parse_image_count(None) is None
    for state in ([1, 2], [1, 2, "3"], [-1, 0, 4], [True, 0, 4], [2**63, 0, 4], "123", {}):
        with pytest.raises(ValueError, match="images_seen must be three counts"):
            parse_image_count(state)
