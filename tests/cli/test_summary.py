import signal
from pathlib import Path

import pytest
import torch

from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.cli.summary import fid_rows, resume_line

RECORD = {"metric": "val/fid_360", "value": 4.0, "step": 20, "floor": 2.0}


def test_last_best_and_floor_are_told():
    rows = fid_rows([RECORD | {"value": 3.5, "step": 10}, RECORD])
    assert rows == [
        (
            "val/fid_360",
            "4 at step 20, best 3.5 at step 10; real images in their place: 2",
        )
    ]


def test_metrics_of_other_numbers_of_samples_are_not_compared():
    rows = fid_rows([RECORD, RECORD | {"metric": "val/fid_5k", "value": 1.0}])
    assert [name for name, _ in rows] == ["val/fid_360", "val/fid_5k"]
    assert rows[0][1].startswith("4 at step 20, best 4")


def test_a_fid_of_samples_that_were_not_finite_is_told_and_never_the_best():
    rows = fid_rows([RECORD, RECORD | {"value": None, "step": 30}])
    assert rows[0][1].startswith("NaN at step 30, best 4 at step 20")
    assert fid_rows([RECORD | {"value": None}])[0][1].startswith("NaN at step 20; real")


def test_a_run_without_evaluations_has_no_rows():
    assert fid_rows([]) == []


@pytest.mark.parametrize(
    "options",
    [
        "--config digits.yaml",
        "--config digits.yaml --ckpt_path=last",
        "--config digits.yaml --trainer.default_root_dir=elsewhere",
        "--ckpt_path=runs/digits/checkpoints/best.ckpt",
        "--config digits.yaml --ckpt_path=other/checkpoints/best.ckpt",
        "--config digits.yaml --ckpt_path=best.ckpt --trainer.default_root_dir=elsewhere",
    ],
)
def test_a_fit_that_was_stopped_goes_on_as_it_says(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in ("runs/digits", "other", "elsewhere"):
        for name in ("last", "best"):
            file = Path(root, "checkpoints", f"{name}.ckpt")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state_dict": {}, "global_step": 1}, file)
    Path("best.ckpt").touch()
    request = read_command_line(["fit", *options.split()])
    told = resume_line(request, 3, signal.SIGTERM, True)
    assert told.startswith("Stopped by SIGTERM at step 3. The same command with --ckpt_path=")
    again = next(word for word in told.split() if word.startswith("--ckpt_path"))
    going_on = read_command_line(["fit", *options.split(), again])
    assert going_on.root == request.root
    assert going_on.checkpoint == request.root / "checkpoints" / "last.ckpt"
    assert told.endswith(f" goes on from {going_on.checkpoint}.")
    lost = resume_line(request, 3, signal.SIGINT, False)
    assert lost.startswith(
        "Stopped by SIGINT at step 3. The 2 steps since step 1 are lost. The same"
    )
