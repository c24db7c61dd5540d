import os
import signal
from pathlib import Path

import pytest
import torch
from support.saving import fit

from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.cli.run_outputs import RunConfig, fid_rows, resume_line

RECORD = {"metric": "val/fid_360", "value": 4.0, "step": 20, "floor": 2.0}


def test_a_config_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """What is half a config would be taken for another run's, or for none."""

    class Parser:
        def dump(self, config, **options):
            return "trainer:"

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fit(RunConfig(Parser(), None), tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], {}),
        (
            [RECORD | {"value": 3.5, "step": 10}, RECORD],
            {"val/fid_360": "4 at step 20, best 3.5 at step 10; real images in their place: 2"},
        ),
        (  # those of other numbers of images are not compared
            [RECORD, RECORD | {"metric": "val/fid_5k", "value": 1.0}],
            {
                "val/fid_360": "4 at step 20, best 4 at step 20; real images in their place: 2",
                "val/fid_5k": "1 at step 20, best 1 at step 20; real images in their place: 2",
            },
        ),
        (  # of samples that were not finite
            [RECORD, RECORD | {"value": None, "step": 30}],
            {"val/fid_360": "NaN at step 30, best 4 at step 20; real images in their place: 2"},
        ),
    ],
)
def test_a_summary_has_the_last_the_best_and_the_floor_of_each_fid(records, expected):
    assert dict(fid_rows(records)) == expected


@pytest.mark.parametrize(
    "options",
    [
        "--config digits.yaml",
        "--config digits.yaml --ckpt_path=last",
        "--ckpt_path=runs/digits/checkpoints/best.ckpt",
        "--config digits.yaml --ckpt_path=other/checkpoints/best.ckpt",
        "--config digits.yaml --ckpt_path=best.ckpt --trainer.default_root_dir=elsewhere",
    ],
)
def test_a_fit_that_was_stopped_resumes_as_it_says(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in ("runs/digits", "other", "elsewhere"):
        for name in ("last", "best"):
            file = Path(root, "checkpoints", f"{name}.ckpt")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state_dict": {}, "global_step": 1}, file)
    Path("best.ckpt").touch()
    request = read_command_line(["fit", *options.split()])
    line = resume_line(request, 3, signal.SIGTERM, True)
    assert line.startswith("Stopped by SIGTERM at step 3. The same command with --ckpt_path=")
    again = next(word for word in line.split() if word.startswith("--ckpt_path"))
    resumed = read_command_line(["fit", *options.split(), again])
    assert resumed.root == request.root
    assert resumed.checkpoint == request.root / "checkpoints" / "last.ckpt"
    assert line.endswith(f" goes on from {resumed.checkpoint}.")
    line = resume_line(request, 3, signal.SIGINT, False)
    assert "SIGINT at step 3. The 2 steps since step 1 are lost. The same" in line


def test_a_config_begins_with_what_the_run_was_computed_on(tmp_path):
    class Parser:
        def dump(self, config, **options):
            return "trainer: {}\n"

    fit(RunConfig(Parser(), None), tmp_path, max_steps=1)
    first, *rest = (tmp_path / "config.yaml").read_text().splitlines()
    precision = torch.get_float32_matmul_precision()
    assert first == (
        f"# torch {torch.__version__} on 1 x cpu, float32 matmul precision {precision}, Adam"
    )
    assert rest == ["trainer: {}"]
