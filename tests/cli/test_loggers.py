import csv
import json

import pytest

from lit_diffusion.cli.loggers import (
    AppendingCSVLogger,
    read_evaluations,
    read_rows,
    rewind_evaluations,
)


def log_steps(logger, steps, every=1):
    for step in steps:
        if step % every == 0:
            logger.log_metrics({"train/loss": 1 / (1 + step), "epoch": step // 4}, step=step)
        if step % 4 == 3:
            logger.log_metrics({"val/loss": 2 / (1 + step), "epoch": step // 4}, step=step)


def test_reopening_keeps_the_rows_that_are_there(tmp_path):
    log_steps(AppendingCSVLogger(tmp_path), range(5))
    before = (tmp_path / "metrics.csv").read_text()
    AppendingCSVLogger(tmp_path).save()
    assert (tmp_path / "metrics.csv").read_text() == before
    log_steps(AppendingCSVLogger(tmp_path), range(5, 6))
    assert (tmp_path / "metrics.csv").read_text().startswith(before)


@pytest.mark.parametrize("died_at", [9, 12])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rewound", [False, True])
def test_a_resume_leaves_the_file_of_an_undisturbed_run(tmp_path, died_at, every, rewound):
    log_steps(AppendingCSVLogger(tmp_path / "whole"), range(16), every)
    log_steps(AppendingCSVLogger(tmp_path / "resumed"), range(died_at), every)
    resumed = AppendingCSVLogger(tmp_path / "resumed")  # from a checkpoint of 9 steps
    if rewound:
        resumed.rewind(9)
    log_steps(resumed, range(9, 16), every)
    whole, again = (tmp_path / name / "metrics.csv" for name in ("whole", "resumed"))
    assert again.read_text() == whole.read_text()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_row_logged_ahead_stands_where_it_is_logged(tmp_path, is_right):
    """Whether it was right ahead or not: a resumed process may know less of it, or more."""
    for name in ("whole", "ahead"):
        logger, row = AppendingCSVLogger(tmp_path / name), {"loss": 0.5, "decay": 0.9}
        logger.log_metrics({"fid": 3.0}, step=1)
        if name == "ahead":
            logger.log_ahead(row if is_right else {"loss": 0.5}, step=1)
        logger.log_metrics({"levels": 0.25}, step=1)
        logger.log_metrics(row, step=1)
    whole, ahead = (tmp_path / name / "metrics.csv" for name in ("whole", "ahead"))
    assert ahead.read_text() == whole.read_text()


def test_a_score_of_the_step_that_a_run_goes_on_from_stays(tmp_path):
    """It was logged before the checkpoint; the training rows of that number come after it."""
    rows = [{"val/fid": 3.0}, {"train/loss": 1.0}, {"val/loss": 2.0}]
    for row in rows:
        AppendingCSVLogger(tmp_path).log_metrics(row, step=20)
    resumed = AppendingCSVLogger(tmp_path)
    resumed.rewind(20)
    for row in rows[1:]:
        resumed.log_metrics(row, step=20)
    expected = [{"step": "20"} | {k: str(v) for k, v in row.items()} for row in rows]
    assert read_rows(tmp_path / "metrics.csv") == expected


def test_new_metrics_become_columns_and_old_rows_stay_readable(tmp_path):
    logger = AppendingCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"b, with comma": 2.0}, step=1)
    with logger.path.open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "0", "a": "1.0", "b, with comma": ""},
        {"step": "1", "a": "", "b, with comma": "2.0"},
    ]


def test_a_row_without_a_step_deletes_no_other(tmp_path):
    AppendingCSVLogger(tmp_path).log_metrics({"loss": 0.5}, step=3)
    AppendingCSVLogger(tmp_path).log_metrics({"accuracy": 0.25})
    rows = [{"step": "3", "loss": "0.5"}, {"accuracy": "0.25"}]
    assert read_rows(tmp_path / "metrics.csv") == rows


def test_columns_do_not_depend_on_the_order_in_which_a_process_first_logged_them(tmp_path):
    """Lightning's rows have that order, and a resumed run may begin with another metric."""
    logger = AppendingCSVLogger(tmp_path)
    logger.rewind(0)  # an empty file
    logger.log_metrics({"b": 1.0, "a": 2.0}, step=0)
    logger.log_metrics({"d": 1.0, "c": 2.0}, step=1)
    assert logger.path.read_text().splitlines()[0] == "step,a,b,c,d"


def test_a_row_cut_off_by_a_crash_is_dropped_and_no_other(tmp_path):
    log_steps(AppendingCSVLogger(tmp_path), range(3))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,0.2")
    AppendingCSVLogger(tmp_path).log_metrics({"train/loss": 0.1}, step=3)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == ["0", "1", "2", "3"]


def test_evaluations_are_rewound_to_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (10, 20, 30)) + '{"st')
    assert [record["step"] for record in read_evaluations(path)] == [10, 20, 30]  # not the last
    assert rewind_evaluations(path, 20) == 1
    assert read_evaluations(path) == [{"step": 10}, {"step": 20}]
