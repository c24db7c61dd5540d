import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.saving import fit
from support.tiny_run import TinyModule, TinyNet

from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.cli.run_outputs import RunConfig, fid_rows, resume_line


def test_a_summary_has_the_last_the_best_and_the_floor_of_each_fid():
    record = {"metric": "val/fid_360", "value": 4.0, "step": 20, "floor": 2.0}
    diverged = record | {"value": None, "step": 30}
    text = "NaN at step 30, best 4 at step 20; real images instead of samples: 2"
    other = record | {"metric": "val/fd_clip_360"}
    assert dict(fid_rows([record, other, diverged])) == {
        "val/fid_360": text,
        "val/fd_clip_360": "4 at step 20, best 4 at step 20; real images instead of samples: 2",
    }
    assert fid_rows([]) == []


@pytest.mark.parametrize(
    "options",
    [
        "--config digits.yaml",
        "--config digits.yaml --ckpt_path=last",
        "--config digits.yaml --ckpt_path=other/checkpoints/best.ckpt",
        "--config digits.yaml --ckpt_path=best.ckpt --trainer.default_root_dir=elsewhere",
    ],
)
def test_a_fit_that_was_stopped_resumes_as_it_says(options, folder):
    for root in ("runs/digits", "other", "elsewhere"):
        Path(root, "checkpoints").mkdir(parents=True)
        for name in ("last", "best"):
            content = {"state_dict": {}, "global_step": 1}
            torch.save(content, f"{root}/checkpoints/{name}.ckpt")
    Path("best.ckpt").touch()
    request = read_command_line(["fit", *options.split()])
    line = resume_line(request, 3, signal.SIGTERM, True)
    assert line.startswith("Stopped by SIGTERM at step 3. Repeat the command with --ckpt_path=")
    again = next(word for word in line.split() if word.startswith("--ckpt_path"))
    resumed = read_command_line(["fit", *options.split(), again])
    assert resumed.root == request.root
    assert resumed.checkpoint == request.root / "checkpoints" / "last.ckpt"
    assert line.endswith(f" to resume from {resumed.checkpoint}.")
    assert "2 steps since step 1 are lost" in resume_line(request, 3, signal.SIGINT, False)


@pytest.mark.parametrize("fused", [False, True])
def test_a_config_says_what_the_run_was_computed_on(tmp_path, fused):
    parser = SimpleNamespace(dump=lambda config, **options: "trainer: {}\n")
    module = TinyModule(TinyNet(3), partial(torch.optim.Adam, fused=fused))
    fit(RunConfig(parser, None), tmp_path, module=module, max_steps=1)
    first, *rest = (tmp_path / "config.yaml").read_text().splitlines()
    precision = torch.get_float32_matmul_precision()
    assert first == (
        f"# torch {torch.__version__} on 1 x cpu, float32 matmul precision {precision}, Adam"
        + (" with fused=True" if fused else "")
    )
    assert rest == ["trainer: {}"]
