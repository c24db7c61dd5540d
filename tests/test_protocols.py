"""Every shipped strategy fits its protocol: for jsonargparse, which loads it from YAML, and so for
mypy."""

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_diffusion import protocols
from lit_diffusion.protocols import NonFiniteSamples, by_part

VELOCITY = "lit_diffusion.parameterizations.Velocity"
LEVELS = {"sigma_min": 0.002, "sigma_max": 80.0}
UNIFORM, EVEN = "lit_diffusion.timesteps.Uniform", "lit_diffusion.grids.Even"
BETAS = {"class_path": "lit_diffusion.processes.GivenBetas", "init_args": {"values": [0.1, 0.2]}}
BENT = {
    "class_path": "lit_diffusion.processes.ZeroTerminalSNR",
    "init_args": {"base": "lit_diffusion.processes.LinearBetas"},
}
SIMPLE = {"weighting": "lit_diffusion.losses.Simple"}
BY_NAME = {
    "TimestepDistribution": "timesteps.Uniform",
    "UniformDraws": "timesteps.Independent timesteps.Stratified timesteps.Antithetic",
    "Weighting": "losses.Simple losses.TruncSNR losses.InvSNR",
    "TimeGrid": "grids.Stride grids.Even",
    "Variance": "gaussian.FixedSmall gaussian.FixedLarge gaussian.LearnedRange",
    "Codec": "codecs.PixelCodec",
    "Parameterization": "parameterizations.Epsilon parameterizations.Sample "
    "parameterizations.Velocity parameterizations.FlowVelocity",
}
FITTING = [
    *((protocol, name, {}) for protocol, names in BY_NAME.items() for name in names.split()),
    ("Process", "processes.DiscreteVP", {"betas": "lit_diffusion.processes.CosineBetas"}),
    ("Process", "processes.DiscreteVP", {"betas": "lit_diffusion.processes.LinearBetas"}),
    ("Process", "processes.DiscreteVP", {"betas": "lit_diffusion.processes.SigmoidBetas"}),
    ("Process", "processes.ContinuousVP", {"t_min": 1e-3}),
    ("Process", "processes.EDMProcess", {"sigma_max": 10.0}),
    ("Process", "processes.VE", {"sigma_max": 50.0}),
    ("Process", "processes.LinearFlow", {"t_min": 1e-3}),
    ("Process", "processes.DiscreteVP", {"betas": BETAS}),
    ("Process", "processes.DiscreteVP", {"betas": BENT}),
    ("TimestepDistribution", "timesteps.LogitNormal", {"std": 0.5}),
    ("TimestepDistribution", "timesteps.Shifted", {"base": UNIFORM, "shift": 2.0}),
    ("TimestepDistribution", "timesteps.LogNormal", {"mean": -0.4}),
    ("Parameterization", "parameterizations.EDMPreconditioning", {"sigma_data": 0.7}),
    ("Parameterization", "parameterizations.FDM", {"base": VELOCITY, **LEVELS}),
    ("Weighting", "losses.FDMWarmup", {"base": "lit_diffusion.losses.Simple", "warmup_steps": 3}),
    ("Weighting", "losses.MinSNR", {"gamma": 3.0, "zero_snr_weight": 1.0}),
    ("Weighting", "losses.P2", {"gamma": 0.5}),
    ("Weighting", "losses.SoftMinSNR", {"gamma": 2.0}),
    ("Weighting", "losses.AsFlow", {"floor": 0.1}),
    ("Loss", "losses.DenoisingLoss", SIMPLE),
    ("Loss", "losses.HybridLoss", SIMPLE),
    ("Loss", "losses.UncertaintyLoss", SIMPLE),
    ("TimeGrid", "grids.Sections", {"counts": [3, 4]}),
    ("TimeGrid", "grids.LogSNR", {"noisiest": -10.0}),
    ("TimeGrid", "grids.Karras", {"rho": 5}),
    ("TimeGrid", "grids.ShiftedGrid", {"base": EVEN, "shift": 2.0}),
    ("Solver", "solvers.DDPM", {"variance": "lit_diffusion.gaussian.FixedSmall"}),
    ("Solver", "solvers.DDIM", {"times": "lit_diffusion.grids.Stride", "eta": 1}),
    ("Solver", "solvers.DPMSolverPP", {"steps": 7}),
    ("Solver", "solvers.Heun", {"times": "lit_diffusion.grids.Karras", "churn": 40.0}),
    ("Solver", "solvers.DPMSolverPP2S", {"eta": 1.0}),
    ("Solver", "solvers.UniPC", {"order": 3}),
    ("Solver", "solvers.Euler", {"times": EVEN}),
    ("Solver", "solvers.EulerAncestral", {"eta": 0.5}),
    ("Guidance", "guidance.ClassifierFree", {"scale": 2.0, "rescale": 0.7}),
    ("Guidance", "guidance.ClassifierFree", {"interval": [0.3, 5.0]}),
    ("Conditioning", "conditioning.ClassLabels", {"num_classes": 10}),
]


@pytest.mark.parametrize(("protocol", "name", "init_args"), FITTING)
def test_a_strategy_is_loaded_by_its_class_path(protocol, name, init_args):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=getattr(protocols, protocol))
    spec = {"class_path": f"lit_diffusion.{name}", "init_args": init_args}
    strategy = parser.instantiate(parser.parse_object({"strategy": spec})).strategy
    assert type(strategy).__name__ == name.split(".")[1]
    for key, value in init_args.items():
        if isinstance(value, int | float):
            assert getattr(strategy, key) == value


def test_a_class_that_does_not_fit_is_refused():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=protocols.Solver)
    with pytest.raises(Exception, match="Velocity"):
        parser.parse_object({"strategy": {"class_path": VELOCITY}})


def test_functions_apply_to_conditions_of_one_part_or_several():
    rows, mask = torch.arange(4.0).view(2, 2), torch.tensor([True, False])
    assert torch.equal(by_part(torch.neg, rows), -rows)
    parts = by_part(lambda *halves: torch.cat(halves), (rows, mask), (rows, mask))
    assert [part.shape for part in parts] == [(4, 2), (4,)]


def test_non_finite_samples_name_seeds_step_and_noise_level():
    error = NonFiniteSamples(range(20), 1234, "t = 40")
    assert error.seeds == list(range(20))
    assert all(words in str(error) for words in ("20 samples", "1234", "t = 40", "seeds 0, 1, 2"))
