import math

import pytest
import torch
from support.golden import Z, close, load, tensor
from support.solving import (
    COSINE,
    SHAPE,
    Recorder,
    k_diffusion_data,
    no_noise,
)
from support.toy import CountedNoise, EndsInNoise, gaussian_denoiser, gaussian_flow

from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.processes import (
    VE,
    ContinuousVP,
    EDMProcess,
    LinearFlow,
)
from lit_diffusion.solvers import (
    DDIM,
    DDPM,
    DPMSolverPP,
    DPMSolverPP2S,
    Euler,
    EulerAncestral,
    Heun,
    UniPC,
)
from lit_diffusion.timesteps import Even, Karras, LogSNR

EVERY = [COSINE, ContinuousVP(), EDMProcess(), VE(0.002), LinearFlow()]


def error(solver, process, steps, **options):
    """Beside the exact end of the flow for data N(0.3, 0.5^2)."""
    grid = LogSNR(noisiest=-9.0)
    noisiest, start = grid.grid(process, 2)[0], Z(SHAPE, 950)
    exact = gaussian_flow(process, process.prior(start, noisiest), noisiest.item())
    solver = solver(steps, times=grid, clip=False, **options)
    end = solver.sample(gaussian_denoiser(process), process, start, no_noise)
    return (end - exact).abs().max().item()


@pytest.mark.parametrize("process", EVERY, ids=repr)
@pytest.mark.parametrize(
    ("solver", "order"),
    [(DDIM, 1), (Euler, 1), (DPMSolverPP, 2), (DPMSolverPP2S, 2), (Heun, 2), (UniPC, 3)],
)
def test_error_falls_with_the_order_of_the_solver(solver, order, process):
    """Halving the step divides it by 2^order; UniPC's corrector is of one order more than it."""
    observed = math.log2(error(solver, process, 40) / error(solver, process, 80))
    assert observed > order - 0.2


@pytest.mark.parametrize("process", EVERY, ids=repr)
def test_a_third_order_leaves_less_error_than_a_second(process):
    """After a first step of first order the global error is of second order for both."""
    second, third = (error(DPMSolverPP, process, 40, order=order) for order in (2, 3))
    assert third < 0.6 * second


@pytest.mark.parametrize("kind", ["gauss", "mix"])
@pytest.mark.parametrize(
    ("tag", "solver"),
    [
        ("dpmpp_2m", DPMSolverPP(10, Karras(), clip=False)),
        ("dpmpp_2m_n20", DPMSolverPP(20, Karras(), clip=False)),
        ("dpmpp_2m_sde", DPMSolverPP(10, Karras(), clip=False, eta=1.0)),
        ("dpmpp_2m_sde_eta0", DPMSolverPP(10, Karras(), clip=False)),
        ("dpmpp_2s_ancestral", DPMSolverPP2S(10, Karras(), clip=False, eta=1.0)),
        ("euler", Euler(10, times=Karras(), clip=False)),
        ("euler_ancestral", EulerAncestral(10, clip=False)),
        ("euler_ancestral", DDPM(FixedSmall(), 10, Karras(), clip=False)),
        ("heun", Heun(10, clip=False)),
        ("heun_n20", Heun(20, clip=False)),
    ],
    ids=str,
)
def test_solvers_equal_k_diffusion_in_its_own_process(kind, tag, solver):
    expected = tensor("case11_kdiffusion", f"{kind}/{tag}/final")
    denoise, noise = Recorder(k_diffusion_data(kind)), CountedNoise(960)
    close(solver.sample(denoise, EDMProcess(), Z(expected.shape, 950), noise), expected)
    assert len(denoise.times) == load("case11_kdiffusion")[f"{kind}/{tag}/model_calls"]
    assert noise.calls == load("case11_kdiffusion")[f"{kind}/{tag}/noise_calls"]


@pytest.mark.parametrize("process", [EndsInNoise(), LinearFlow()], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [
        DDPM(FixedSmall(), 9, LogSNR()),
        DDIM(9, times=Karras()),
        DPMSolverPP(9),
        DPMSolverPP(9, eta=1.0, order=3),
    ],
    ids=repr,
)
def test_a_grid_that_is_not_finite_is_refused_and_another_leads_to_the_image(solver, process):
    with pytest.raises(ValueError, match=r"not finite on .* no signal .* use Even or Sections"):
        solver.check(process)
    for times in (Even(), LogSNR(noisiest=-10.0)):
        mended = type(solver)(**{**vars(solver), "times": times, "clip": False})
        mended.check(process)
        end = mended.sample(gaussian_denoiser(process), process, Z(SHAPE, 1), CountedNoise(1))
        assert (end.mean() - 0.3).abs() < 0.5
        assert end.isfinite().all()


@pytest.mark.parametrize("process", [COSINE, EDMProcess()], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [
        DDPM(FixedSmall(), 7, LogSNR()),
        DDIM(7, eta=0.5, times=LogSNR()),
        DPMSolverPP(7),
        DPMSolverPP(7, order=3, eta=0.5),
        DPMSolverPP2S(7),
        DPMSolverPP2S(7, eta=1.0),
        EulerAncestral(7),
        UniPC(7),
        Heun(7),
        Heun(7, churn=4.0, churn_max=9.0),
    ],
    ids=repr,
)
def test_a_watch_sees_every_step_in_order_and_changes_nothing(solver, process):
    def sampled(*watch):
        denoise = gaussian_denoiser(process)
        return solver.sample(denoise, process, Z(SHAPE, 1), CountedNoise(1), *watch)

    seen = []
    assert torch.equal(sampled(lambda *step: seen.append(step)), sampled())
    steps, times, states, images = zip(*seen, strict=True)
    assert steps == tuple(range(7))
    t = torch.stack([*times, torch.tensor(process.t_clean)])
    assert (t.diff() < 0).all()
    close(t[0], torch.tensor(process.t_max), rtol=1e-14)
    close(states[0], process.prior(Z(SHAPE, 1), t[0]), rtol=1e-14)
    assert all(x_t.shape == x0.shape == SHAPE for x_t, x0 in zip(states, images, strict=True))
    assert torch.stack(images).abs().max() <= 1  # as clipped


@pytest.mark.parametrize("solver", [DDIM, Euler, DPMSolverPP, DPMSolverPP2S, UniPC, Heun])
def test_a_solver_without_steps_is_refused(solver):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        solver(steps=0)
