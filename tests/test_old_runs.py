"""Runs of an earlier version load, sample and resume as they did (tests/golden/README.md)."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import call

from lit_diffusion import load

GOLDEN = Path(__file__).parent / "golden" / "runs_0ce0e2a"
RUNS = {"labels": 5, "words": 5, "uvit": 5, "dcgan": 8}
"""run -> optimizer steps after which its weights were noted."""


@pytest.mark.parametrize("run", RUNS)
def test_an_old_checkpoint_samples_the_same_images(run):
    module = None
    for weights in ("raw", "ema"):
        module = load(GOLDEN / run / "checkpoints" / "last.ckpt", weights, module=module)
        images = module.generate([0, 1, 2]).numpy().astype(int)
        expected = np.load(GOLDEN / run / "expected.npz")[weights].astype(int)
        assert abs(images - expected).max() <= 1  # another CPU may round another way


@pytest.mark.quick("labels")
@pytest.mark.parametrize("run", RUNS)
def test_an_old_run_resumes_from_its_own_config(run, folder):
    shutil.copytree(GOLDEN / run, f"runs/{run}")
    command = f"fit --config runs/{run}/config.yaml --ckpt_path=last"
    limits = f"--trainer.max_steps={RUNS[run]} --trainer.default_root_dir=runs/{run}"
    assert call(f"{command} {limits}") == 0
    state = load(f"runs/{run}", "raw").state_dict()
    expected = np.load(GOLDEN / run / "expected.npz")
    names = [name for name, value in state.items() if value.is_floating_point()]
    sums = [state[name].double().abs().sum() for name in names]
    assert len(names) == len(expected["resumed_names"])
    torch.testing.assert_close(
        torch.stack(sums), torch.tensor(expected["resumed_sums"]), rtol=1e-4, atol=1e-5
    )
