from dataclasses import replace

import pytest
import torch
from support.golden import Z, close
from support.solving import COSINE, SHAPE, no_noise
from support.toy import CountedNoise, gaussian_denoiser, gaussian_flow

from lit_diffusion.gaussian import FixedSmall, LearnedRange, posterior
from lit_diffusion.grids import Even, LogSNR, Sections
from lit_diffusion.processes import EDMProcess, LinearFlow
from lit_diffusion.protocols import Denoised
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
from lit_diffusion.solvers.editing import (
    NoisedImagePrior,
    RePaint,
    Tail,
    repaint_solver,
    truncate_solver,
)
from lit_diffusion.solvers.steps import solver_times

SOLVERS = [DDIM(), DDPM(FixedSmall()), Euler(), EulerAncestral(), Heun(), DPMSolverPP()]
SOLVERS += [DPMSolverPP2S(), UniPC()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("steps", [5, 1000])
def test_a_strength_is_a_share_of_the_steps_on_the_solvers_own_grid(solver, steps):
    whole = replace(solver, steps=steps)
    for strength in (0.001, 0.3, 0.7, 0.99, 1.0):  # 700 / 0.7 > 1000 in floating point
        part = truncate_solver(whole, strength, COSINE)
        assert part.steps == max(1, round(strength * steps))
        expected = solver.default_times(COSINE).grid(COSINE, steps)[-part.steps - 1 :]
        close(part.times.grid(COSINE, part.steps), expected)
    even = replace(whole, times=Even())
    assert truncate_solver(even, 0.5, COSINE).times.base == Even()
    repaint = repaint_solver(even, COSINE, None, None)
    assert (repaint.times, repaint.variance) == (Even(), getattr(solver, "variance", None))


@pytest.mark.parametrize("strength", [0.05, 0.3, 1.0])
def test_the_last_steps_of_heun_keep_their_churn(strength):
    """It is a sum over all steps, of which each adds its share."""
    whole, process = Heun(20, churn=2.0), EDMProcess()
    part = truncate_solver(whole, strength, process)
    times = solver_times(part, process)
    close(times, solver_times(whole, process)[-len(times) :], rtol=1e-12)


def test_strengths_and_solvers_that_cannot_be_are_refused():
    for strength in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="strength must be above 0 and at most 1, got"):
            truncate_solver(DDIM(), strength, COSINE)
    message = "and object is not; use another"
    with pytest.raises(ValueError, match=message):
        truncate_solver(object(), 0.5, COSINE)
    with pytest.raises(ValueError, match=message):
        repaint_solver(object(), COSINE, None, None)


@pytest.mark.parametrize("process", [COSINE, EDMProcess(), LinearFlow()], ids=repr)
@pytest.mark.parametrize("solver", [DDIM(60), Heun(30)], ids=str)
def test_a_sample_that_begins_at_an_image_is_where_the_flow_takes_it(solver, process):
    grid = Tail(LogSNR(noisiest=-9.0), 2 * solver.steps)
    x0, noise = 0.3 + 0.5 * Z(SHAPE, 1), Z(SHAPE, 2)
    solver = replace(solver, times=grid, clip=False)
    end = solver.sample(gaussian_denoiser(process), NoisedImagePrior(process, x0), noise, no_noise)
    t = grid.grid(process, solver.steps)[0].item()
    alpha, sigma = process.alpha_sigma(torch.tensor([t]))
    close(end, gaussian_flow(process, alpha * x0 + sigma * noise, t), rtol=0, atol=0.03)


def correlated(times):
    """The exact denoiser of pairs of pixels with sd 0.413 and correlation 0.9, and its variance."""
    cov = 0.413**2 * torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    steps = posterior(COSINE, times)

    def denoise(x, t):
        alpha, sigma = (v[0] for v in COSINE.alpha_sigma(t))
        gain = alpha * cov @ torch.linalg.inv(alpha**2 * cov + sigma**2 * torch.eye(2))
        x0 = (x.flatten(1) @ gain.T).view_as(x)
        step = steps.at((times[:-1] - t[0]).abs().argmin())
        variance = step.variance + step.x0_coef**2 * (cov - alpha * gain @ cov)[1, 1]
        fraction = (variance.log() - step.log_variance) / (step.log_beta - step.log_variance)
        return Denoised(x0, (x - alpha * x0) / sigma, fraction.expand_as(x))

    return denoise


def repainted(resamples, variance=None, n=10_000):
    """The second pixel, where the first is 0.413: N(0.372, 0.18^2) by the data."""
    generator = torch.Generator().manual_seed(0)
    noise = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    known = torch.full((n, 1, 1, 2), 0.413, dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    solver = RePaint(known, mask, 100, resamples, clip=False, variance=variance)
    denoise = correlated(Sections().grid(COSINE, 100))
    x = solver.sample(denoise, COSINE, noise(known), noise)
    assert torch.equal(x[..., 0], known[..., 0])
    return x[..., 1].flatten()


@pytest.mark.slow
def test_resampling_makes_what_is_missing_fit_what_is_known():
    """Replacement alone hears of the known pixel too late."""
    plain, resampled = repainted(1), repainted(10)
    assert abs(resampled.mean() - 0.3717) < 0.15 * abs(plain.mean() - 0.3717)
    assert resampled.std().item() == pytest.approx(0.18, abs=0.01)
    # the variance that the network has learned, as FixedSmall takes too little noise each time
    assert repainted(10, FixedSmall()).std() < 0.16
    assert torch.equal(repainted(2), repainted(2, LearnedRange()))


@pytest.mark.parametrize("clip", [{}, {"clip": True}, {"clip": False}])
def test_repaint_clamps_images_unless_it_is_told_not_to(clip):
    denoise = lambda x, t: Denoised(torch.full_like(x, 3.0), torch.zeros_like(x))  # noqa: E731
    solver = RePaint(torch.zeros(SHAPE), torch.zeros(1, 1, 4, 4), 3, 1, **clip)
    x0 = solver.sample(denoise, COSINE, Z(SHAPE, 2), CountedNoise(1))
    assert x0.max().item() == pytest.approx(1 if clip.get("clip", True) else 3)


def test_repaint_is_told_step_by_step_and_refuses_none():
    steps = []
    known, mask = Z(SHAPE, 1).clamp(-1, 1), torch.zeros(1, 1, 4, 4)
    solver = RePaint(known, mask, 5, 2, Sections())
    solver.check(COSINE)
    watch = lambda *step: steps.append(step[0])  # noqa: E731
    solver.sample(gaussian_denoiser(COSINE), COSINE, Z(SHAPE, 2), CountedNoise(1), watch)
    assert steps == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        RePaint(known, mask, 5, 0)
    with pytest.raises(ValueError, match="discrete steps"):
        RePaint(known, mask, times=Sections()).check(EDMProcess())
    RePaint(known, mask).check(EDMProcess())
