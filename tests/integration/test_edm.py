"""EDM, FDM and the continuous VP process, trained and sampled from as a whole."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from support.small_digits import small_digits
from support.tiny_diffusion import images, tiny_diffusion
from support.tiny_run import write_config

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.cli.main import main
from lit_diffusion.grids import Karras
from lit_diffusion.losses import DenoisingLoss, FDMWarmup, Simple
from lit_diffusion.parameterizations import FDM, EDMPreconditioning, Epsilon, Velocity
from lit_diffusion.processes import ContinuousVP, EDMProcess
from lit_diffusion.solvers import DDIM, DPMSolverPP, Heun
from lit_diffusion.timesteps import LogNormal

EDM = {
    "process": EDMProcess(),
    "parameterization": EDMPreconditioning(),
    "times": LogNormal(),
    "solver": Heun(4),
}
FDM_EDM = EDM | {
    "parameterization": FDM(EDMPreconditioning(), sigma_min=0.002, sigma_max=80.0),
    "loss": DenoisingLoss(FDMWarmup(Simple(), 10)),
    "solver": Heun(4, churn=4.0),
}
FDM_VP = {"parameterization": FDM(Velocity(), sigma_min=0.001, sigma_max=152.17)}
VP = {"process": ContinuousVP(), "parameterization": Epsilon(), "solver": DPMSolverPP(4)}
FAMILY = {
    "edm": EDM,
    "edm by ddim": EDM | {"solver": DDIM(4, eta=1.0, times=Karras())},
    "edm by dpm-solver": EDM | {"solver": DPMSolverPP(4)},
    "fdm-edm": FDM_EDM,
    "fdm on cosine betas": FDM_VP,
    "vp": VP,
    "fdm-vp": VP | {"parameterization": FDM(Epsilon(), sigma_min=0.001, sigma_max=152.17)},
}


def quiet_trainer(**options):
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.quick
@pytest.mark.parametrize("changes", FAMILY.values(), ids=FAMILY)
def test_a_member_of_the_family_learns_and_samples(changes):
    module = tiny_diffusion(**changes)
    (before,) = quiet_trainer().validate(module, images(48, 24), verbose=False)
    quiet_trainer(max_steps=60).fit(module, images(48, 12))
    (after,) = quiet_trainer().validate(module, images(48, 24), verbose=False)
    assert after["val/loss"] < 0.95 * before["val/loss"]
    made = module.generate(range(4))
    assert made.shape == (4, 1, 8, 8)
    assert torch.equal(made, module.generate(range(4)))
    assert made.unique().numel() > 20


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
