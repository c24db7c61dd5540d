"""Runs of an earlier version load, sample and resume as they did (tests/golden/README.md)."""

import inspect
import json
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.commands import call

from lit_diffusion import load
from lit_diffusion.config.renamed import rename_config

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


DEFAULTS = yaml.safe_load((GOLDEN.parent / "defaults_0ce0e2a.yaml").read_text())


@pytest.mark.parametrize("path", DEFAULTS, ids=lambda path: path.rpartition(".")[2])
def test_what_an_old_config_leaves_out_has_the_value_that_it_had(path):
    config = rename_config({"class_path": path, "init_args": DEFAULTS[path]})
    module, _, name = config["class_path"].rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    present = {argument: parameters[argument].default for argument in config["init_args"]}
    assert json.loads(json.dumps(present)) == config["init_args"]  # tuples are lists
