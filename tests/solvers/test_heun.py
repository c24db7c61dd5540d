import math

import pytest
import torch
from support.golden import Z, close, load, tensor
from support.solving import COSINE, SHAPE, NoiseOfStep, Recorder, k_diffusion_data
from support.toy import CountedNoise, EndsInNoise, gaussian_denoiser

from lit_diffusion.gaussian import expand_as
from lit_diffusion.grids import Karras, Sections
from lit_diffusion.processes import EDMProcess
from lit_diffusion.protocols import Denoised
from lit_diffusion.solvers import Heun


@pytest.mark.parametrize("kind", ["gauss", "mix"])
def test_churned_heun_equals_k_diffusion(kind):
    solver = Heun(10, clip=False, churn=5.0, churn_min=0.05, churn_max=50.0, churn_noise=1.003)
    denoise = Recorder(k_diffusion_data(kind))
    expected = tensor("case11_kdiffusion", f"{kind}/heun_churn/final")
    start, noise = Z(expected.shape, 950), NoiseOfStep(960, denoise)
    close(solver.sample(denoise, EDMProcess(), start, noise), expected)
    assert len(denoise.times) == load("case11_kdiffusion")[f"{kind}/heun_churn/model_calls"]


@pytest.mark.parametrize(
    ("tag", "solver", "process"),
    [
        ("heun18", Heun(clip=False), EDMProcess()),
        ("heun5", Heun(5, Karras(5.0), clip=False), EDMProcess(0.02, 10.0)),
        ("heun18_churn", Heun(18, None, False, 40.0, 0.05, 50.0, 1.003), EDMProcess()),
        ("heun18_churnmax", Heun(clip=False, churn=80.0, churn_noise=1.007), EDMProcess()),
    ],
)
def test_heun_equals_edm(tag, solver, process):
    def model(x, t):
        sigma = expand_as(t, x)
        x0 = x / (1 + sigma**2) + 0.1 * torch.sin(sigma)
        return Denoised(x0, (x - x0) / sigma)

    denoise = Recorder(model)
    end = solver.sample(denoise, process, Z(SHAPE, 840), NoiseOfStep(850, denoise))
    close(torch.tensor(denoise.times), tensor("case07_edm", f"{tag}/net_sigma"))
    close(torch.stack(denoise.states[::2]), tensor("case07_edm", f"{tag}/x_hat"))
    close(end, tensor("case07_edm", f"{tag}/final"))


def test_levels_are_not_raised_beyond_the_noisiest_step():
    denoise = Recorder(gaussian_denoiser(COSINE))
    Heun(10, Karras(), clip=False, churn=10.0).sample(denoise, COSINE, Z(SHAPE, 1), CountedNoise(1))
    assert max(denoise.times) == COSINE.t_max


def test_heun_is_refused_where_the_image_is_lost():
    process = EndsInNoise()
    for times in (Sections(), Karras()):
        with pytest.raises(ValueError, match=r"needs alpha > 0, but .* use LogSNR\(noisiest=-10"):
            Heun(5, times).check(process)
    with pytest.raises(ValueError, match="times that do not decrease"):
        Heun(5, Karras(math.inf)).check(COSINE)
    for churn in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"churn must be >= 0, got {churn}"):
            Heun(churn=churn)
