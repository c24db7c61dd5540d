from dataclasses import replace

import pytest
import torch
from support.golden import Z, close
from support.solving import COSINE, SHAPE, no_noise
from support.toy import CountedNoise, gaussian_denoiser

from lit_diffusion.gaussian import FixedSmall, expand_as
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


def test_a_tail_has_the_times_of_its_whole():
    whole = LogSNR().grid(COSINE, 20)
    close(Tail(LogSNR(), 20).grid(COSINE, 5), whole[-6:])
    close(Tail(LogSNR(), 20).grid(COSINE, 20), whole)


SOLVERS = [DDIM(), DDPM(FixedSmall()), Euler(), EulerAncestral(), Heun(), DPMSolverPP()]
SOLVERS += [DPMSolverPP2S(), UniPC()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("steps", [5, 1000])
def test_a_strength_is_a_share_of_the_steps_on_the_solvers_own_grid(solver, steps):
    whole = replace(solver, steps=steps)
    for strength in (0.001, 0.3, 0.7, 0.99, 1.0):  # 700 / 0.7 > 1000 in floating point
        part = truncate_solver(whole, strength)
        assert part.steps == max(1, round(strength * steps))
        expected = solver.default_times.grid(COSINE, steps)[-part.steps - 1 :]
        close(part.times.grid(COSINE, part.steps), expected)
    even = replace(whole, times=Even())
    assert truncate_solver(even, 0.5).times.base == repaint_solver(even, None, None).times == Even()


def test_strengths_and_solvers_that_cannot_be_are_refused():
    for strength in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="strength must be above 0 and at most 1, got"):
            truncate_solver(DDIM(), strength)
    for of in (lambda s: truncate_solver(s, 0.5), lambda s: repaint_solver(s, None, None)):
        with pytest.raises(ValueError, match="and object is no dataclass with both; use another"):
            of(object())


@pytest.mark.parametrize("process", [COSINE, EDMProcess(), LinearFlow()], ids=repr)
@pytest.mark.parametrize("solver", [DDIM(60), DPMSolverPP(30), Heun(30)], ids=str)
def test_a_sample_that_begins_at_an_image_is_where_the_flow_takes_it(solver, process):
    """Data N(0.3, 0.5^2): from alpha x0 + sigma noise the flow is a straight rescaling."""
    grid = Tail(LogSNR(noisiest=-9.0), 2 * solver.steps)
    x0, noise = 0.3 + 0.5 * Z(SHAPE, 1), Z(SHAPE, 2)
    solver = replace(solver, times=grid, clip=False)
    end = solver.sample(gaussian_denoiser(process), NoisedImagePrior(process, x0), noise, no_noise)
    alpha, sigma = process.alpha_sigma(grid.grid(process, solver.steps)[0])
    x_t = alpha * x0 + sigma * noise
    expected = 0.3 + 0.5 * (x_t - alpha * 0.3) / ((0.5 * alpha) ** 2 + sigma**2).sqrt()
    close(end, expected, rtol=0, atol=0.03)


def test_little_strength_keeps_the_image():
    x0 = 0.3 + 0.5 * Z(SHAPE, 1)
    ends = [
        DDIM(steps, times=Tail(LogSNR(), 100), clip=False).sample(
            gaussian_denoiser(COSINE), NoisedImagePrior(COSINE, x0), Z(SHAPE, 2), no_noise
        )
        for steps in (5, 40, 90)
    ]
    near, further, far = ((end - x0).abs().mean() for end in ends)
    assert near < 0.02 < further < far


def correlated(process):
    """The exact denoiser of pairs of pixels with unit variance and a correlation of 0.9."""
    cov = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)

    def denoise(x, t):
        alpha, sigma = (v.reshape(-1, 1, 1) for v in process.alpha_sigma(t))
        gain = alpha * cov @ torch.linalg.inv(alpha**2 * cov + sigma**2 * torch.eye(2))
        x0 = (gain @ x.flatten(1)[:, :, None]).view_as(x)
        return Denoised(x0, (x - expand_as(alpha, x) * x0) / expand_as(sigma, x))

    return denoise


def repainted(resamples, n=20_000):
    generator = torch.Generator().manual_seed(0)
    noise = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    known = torch.full((n, 1, 1, 2), 1.0, dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    solver = RePaint(known, mask, 40, resamples, LogSNR(noisiest=-9.0), clip=False)
    x = solver.sample(correlated(COSINE), COSINE, noise(known), noise)
    assert torch.equal(x[..., 0], known[..., 0])
    return x[..., 1].flatten()


@pytest.mark.slow
def test_resampling_makes_what_is_missing_fit_what_is_known():
    """Beside a 1 the other pixel is N(0.9, 0.19); replacement alone hears of it too late."""
    plain, resampled = repainted(1), repainted(10)
    assert abs(resampled.mean() - 0.9) < 0.3 * abs(plain.mean() - 0.9)
    assert resampled.mean().item() == pytest.approx(0.9, abs=0.03)
    assert resampled.var().item() == pytest.approx(0.19, abs=0.03)


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
        RePaint(known, mask).check(EDMProcess())
    RePaint(known, mask, times=Even()).check(EDMProcess())
