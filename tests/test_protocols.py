"""Every shipped strategy fits its protocol: for jsonargparse, which loads it from YAML, and so for
mypy."""

import pickle

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_diffusion import protocols
from lit_diffusion.protocols import NonFiniteSamples, by_part

OURS = "lit_diffusion"
VELOCITY = f"{OURS}.parameterizations.Velocity"
SHIFTED = {"base": f"{OURS}.timesteps.Uniform", "shift": 2.0}
DAMPED = {"base": VELOCITY, "sigma_min": 0.002, "sigma_max": 80.0}
SIMPLE = {"weighting": f"{OURS}.losses.Simple"}
BY_NAME = {
    "Process": "processes.ContinuousVP processes.EDMProcess processes.VE processes.LinearFlow",
    "TimestepDistribution": "timesteps.Uniform timesteps.LogitNormal timesteps.LogNormal",
    "UniformDraws": "timesteps.Independent timesteps.Stratified timesteps.Antithetic",
    "Weighting": "losses.Simple losses.TruncSNR losses.InvSNR losses.SoftMinSNR losses.AsFlow",
    "TimeGrid": "grids.Sections grids.Stride grids.LogSNR grids.Karras grids.Even",
    "Variance": "gaussian.FixedSmall gaussian.FixedLarge gaussian.LearnedRange",
    "Codec": "codecs.PixelCodec",
    "Parameterization": "parameterizations.Epsilon parameterizations.Sample "
    "parameterizations.FlowVelocity parameterizations.EDMPreconditioning",
    "Solver": "solvers.DDIM solvers.DPMSolverPP solvers.DPMSolverPP2S solvers.Heun solvers.Euler "
    "solvers.EulerAncestral",
}
FITTING = [
    *((protocol, name, {}) for protocol, names in BY_NAME.items() for name in names.split()),
    *(
        ("Process", "processes.DiscreteVP", {"betas": f"{OURS}.processes.{betas}"})
        for betas in ("CosineBetas", "LinearBetas", "SigmoidBetas")
    ),
    (
        "TimestepDistribution",
        "timesteps.Shifted",
        SHIFTED,
    ),
    (
        "Parameterization",
        "parameterizations.FDM",
        DAMPED,
    ),
    (
        "Parameterization",
        "parameterizations.ContrastCorrection",
        {"base": VELOCITY, "weight": 0.05},
    ),
    ("Weighting", "losses.FDMWarmup", {"base": SIMPLE["weighting"], "warmup_steps": 3}),
    ("Weighting", "losses.MinSNR", {"gamma": 3.0, "zero_snr_weight": 1.0}),
    ("Weighting", "losses.P2", {"gamma": 0.5}),
    *(("Loss", f"losses.{name}Loss", SIMPLE) for name in ("Denoising", "Hybrid", "Uncertainty")),
    ("TimeGrid", "grids.ShiftedGrid", {"base": f"{OURS}.grids.Even", "shift": 2.0}),
    ("Solver", "solvers.DDPM", {"variance": f"{OURS}.gaussian.FixedSmall"}),
    ("Solver", "solvers.UniPC", {"order": 3}),
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


def test_non_finite_samples_reach_another_process():
    error = NonFiniteSamples(range(20), 1234, "t = 40")
    received = pickle.loads(pickle.dumps(error))
    assert (str(received), received.seeds) == (str(error), error.seeds)
