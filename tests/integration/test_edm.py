"""A config of EDM with FDM, trained, resumed and sampled from as a whole."""

from pathlib import Path

import pytest
from support.small_digits import small_digits
from support.tiny_run import write_config

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.cli.main import main
from lit_diffusion.grids import Karras
from lit_diffusion.losses import FDMWarmup, Simple
from lit_diffusion.parameterizations import FDM, EDMPreconditioning
from lit_diffusion.processes import EDMProcess
from lit_diffusion.solvers import Heun
from lit_diffusion.timesteps import LogNormal


def edm_config(steps):
    config = small_digits(steps)
    config["model"]["init_args"] |= {
        "process": "lit_diffusion.processes.EDMProcess",
        "parameterization": {
            "class_path": "lit_diffusion.parameterizations.FDM",
            "init_args": {
                "base": {
                    "class_path": "lit_diffusion.parameterizations.EDMPreconditioning",
                    "init_args": {"sigma_data": 0.7},
                },
                "sigma_min": 0.002,
                "sigma_max": 80.0,
            },
        },
        "loss": {
            "class_path": "lit_diffusion.losses.DenoisingLoss",
            "init_args": {
                "weighting": {
                    "class_path": "lit_diffusion.losses.FDMWarmup",
                    "init_args": {"base": "lit_diffusion.losses.Simple", "warmup_steps": 2},
                }
            },
        },
        "times": {"class_path": "lit_diffusion.timesteps.LogNormal", "init_args": {"mean": -0.8}},
        "solver": {
            "class_path": "lit_diffusion.solvers.Heun",
            "init_args": {
                "steps": 3,
                "times": {
                    "class_path": "lit_diffusion.grids.Karras",
                    "init_args": {"rho": 5.0},
                },
            },
        },
    }
    return config


@pytest.mark.slow
def test_a_config_trains_and_its_run_resumes_and_samples(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_config(edm_config(3), Path("edm.yaml"))
    assert main(["fit", "--config", "edm.yaml"]) == 0
    module = load("runs/edm", weights="ema")
    assert module.process == EDMProcess()
    assert module.parameterization == FDM(EDMPreconditioning(0.7), 0.002, 80.0)
    assert module.loss.weighting == FDMWarmup(Simple(), 2)
    assert module.times == LogNormal(-0.8)
    assert module.solver == Heun(3, Karras(5.0))
    resume = ["fit", "--config", "edm.yaml", "--ckpt_path=last", "--trainer.max_steps=4"]
    assert main(resume) == 0
    sample = ["sample", "--checkpoint", "runs/edm", "--num", "4", "--out", "out"]
    assert main([*sample, "--steps", "2"]) == 0
    assert len(list(Path("out").glob("0*.png"))) == 4
