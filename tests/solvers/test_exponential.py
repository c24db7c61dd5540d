import pytest
import torch
from support.golden import Z
from support.solving import (
    COSINE,
    SHAPE,
    no_noise,
)
from support.toy import EndsInNoise, gaussian_denoiser, gaussian_flow, mixture_denoiser

from lit_diffusion.grids import Even, LogSNR
from lit_diffusion.processes import EDMProcess, LinearFlow
from lit_diffusion.solvers import (
    DPMSolverPP,
    DPMSolverPP2S,
    UniPC,
)


def test_steps_before_a_log_snr_of_minus_10_are_wasted():
    """Of 20 steps over cosine betas they are a third: without them the error is much smaller."""
    start = Z(SHAPE, 950)
    exact = gaussian_flow(COSINE, start, COSINE.t_max)

    def error(times):
        denoise = gaussian_denoiser(COSINE)
        end = DPMSolverPP(20, times, clip=False).sample(denoise, COSINE, start, no_noise)
        return (end - exact).abs().max()

    assert error(LogSNR(noisiest=-10.0)) < 0.7 * error(LogSNR())


@pytest.mark.parametrize("process", [COSINE, EDMProcess(), LinearFlow(1e-3)], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [
        DPMSolverPP(40, LogSNR(noisiest=-9.0), clip=False, eta=1.0),
        DPMSolverPP(40, LogSNR(noisiest=-9.0), clip=False, eta=1.0, order=3),
        DPMSolverPP2S(30, LogSNR(noisiest=-9.0), clip=False, eta=1.0),
        DPMSolverPP2S(30, LogSNR(noisiest=-9.0), clip=False),
        UniPC(20, LogSNR(noisiest=-9.0), clip=False),
    ],
    ids=str,
)
def test_two_modes_are_reproduced(solver, process):
    """Each moment within five standard errors of a mixture's own."""
    generator = torch.Generator().manual_seed(0)

    def randn_like(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    start = randn_like(torch.empty(20_000, 1, 1, 1, dtype=torch.float64))
    end = solver.sample(mixture_denoiser(process), process, start, randn_like).flatten()
    n, m, v = len(end), 0.5, 0.2**2
    for power, (expected, spread) in {
        1: (0.0, m**2 + v),
        2: (m**2 + v, 4 * m**2 * v + 2 * v**2),
        4: (m**4 + 6 * m**2 * v + 3 * v**2, None),
    }.items():
        values = end**power
        error = (spread or values.var().item()) ** 0.5 / n**0.5
        assert abs(values.mean().item() - expected) < 5 * error + 0.003


def test_orders_and_noise_without_meaning_are_refused():
    for make in (
        lambda: DPMSolverPP(order=4),
        lambda: DPMSolverPP(eta=-1.0),
        lambda: DPMSolverPP2S(eta=1.5),
        lambda: UniPC(order=0),
    ):
        with pytest.raises(ValueError, match=r"must be"):
            make()


@pytest.mark.parametrize("solver", [UniPC(9, Even()), DPMSolverPP2S(9, Even())], ids=repr)
def test_solvers_that_need_signal_are_refused_on_pure_noise(solver):
    for process in (LinearFlow(), EndsInNoise()):
        with pytest.raises(ValueError, match=r"needs alpha > 0, which .* LogSNR\(noisiest=-10\)"):
            solver.check(process)
