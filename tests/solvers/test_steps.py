import math
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from support.golden import Z, close, load, tensor
from support.schedulers import both
from support.solving import COSINE, LINEAR, SHAPE, Recorder, k_diffusion_data, no_noise
from support.toy import CountedNoise, EndsInNoise, gaussian_denoiser, mixture_denoiser, mixture_flow
from torch.utils._python_dispatch import TorchDispatchMode

from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.grids import Even, Karras, LogSNR, ShiftedGrid
from lit_diffusion.processes import VE, ContinuousVP, EDMProcess, LinearFlow
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
from lit_diffusion.solvers.steps import solver_times, time_grid_of

EDM, FLOW = EDMProcess(), LinearFlow()
EVERY = [COSINE, ContinuousVP(), EDM, VE(0.002), FLOW]
USUAL = [DDIM(), DDPM(FixedSmall(), 50), Euler(50), EulerAncestral(), Heun(), DPMSolverPP()]
USUAL += [DPMSolverPP2S(), UniPC()]
GRID, START = LogSNR(noisiest=-9.0), Z(SHAPE, 950)


@cache
def exact_end(process):
    noisiest = GRID.grid(process, 2)[0]
    return mixture_flow(process, process.prior(START, noisiest), noisiest)


@cache
def error(solver, process):
    """Beside the exact end of the flow for data of two modes."""
    solver = replace(solver, times=GRID, clip=False)
    end = solver.sample(mixture_denoiser(process), process, START, no_noise)
    return (end - exact_end(process)).abs().max().item()


@pytest.mark.parametrize("process", EVERY, ids=repr)
@pytest.mark.parametrize(
    ("solver", "order"),
    [
        (DDIM(), 1),
        (Euler(), 1),
        (DPMSolverPP(order=1), 1),
        (DPMSolverPP(), 2),
        (DPMSolverPP(order=3), 2),
        (DPMSolverPP2S(), 2),
        (Heun(), 2),
        (UniPC(order=1), 2),
        (UniPC(), 3),
    ],
    ids=str,
)
def test_error_falls_with_the_order_of_the_solver(solver, order, process):
    """Halving the step divides it by 2^order; UniPC's corrector is of one order more than it."""
    coarse, fine = (error(replace(solver, steps=steps), process) for steps in (100, 200))
    assert abs(math.log2(coarse / fine) - order) < 0.3


def variance_of_samples(solver, process):
    """For data N(0, 0.5^2), exactly: each draw of noise has a row of the batch to itself."""
    start, draws = torch.zeros(2 * solver.steps + 2, 1, 1, 1, dtype=torch.float64), count(1)
    start[0] = 1

    def alone(x):
        return torch.zeros_like(x).index_fill_(0, torch.tensor(next(draws)), 1)

    end = solver.sample(gaussian_denoiser(process, 0.0), process, start, alone)
    return end.square().sum().item()


@pytest.mark.parametrize("process", EVERY[1:], ids=repr)
@pytest.mark.parametrize(
    ("solver", "order"),
    [
        (DDPM(FixedSmall()), 1),
        (EulerAncestral(), 1),
        (DDIM(eta=0.5), 1),
        (DPMSolverPP(order=1, eta=1.0), 1),
        (DPMSolverPP(eta=1.0), 2),
        (DPMSolverPP(order=3, eta=1.0), 2),
        (DPMSolverPP2S(eta=1.0), 2),
        (Heun(churn=10.0), 2),
    ],
    ids=str,
)
def test_the_error_of_random_solvers_falls_with_their_weak_order(solver, order, process):
    """Of the variance; halving the step divides it by 2^order."""
    solver = replace(solver, times=GRID, clip=False)
    coarse, fine = (
        abs(variance_of_samples(replace(solver, steps=steps), process) - 0.25)
        for steps in (80, 160)
    )
    assert abs(math.log2(coarse / fine) - order) < 0.15


@pytest.mark.parametrize("kind", ["gauss", "mix"])
@pytest.mark.parametrize(
    ("tag", "solver"),
    [
        ("dpmpp_2m", DPMSolverPP(10, Karras(), clip=False)),
        ("dpmpp_2m_n20", DPMSolverPP(20, Karras(), clip=False)),
        ("dpmpp_2m_sde", DPMSolverPP(10, Karras(), clip=False, eta=1.0)),
        ("dpmpp_2m_sde_eta0", DPMSolverPP(10, Karras(), clip=False)),
        ("dpmpp_2s_ancestral", DPMSolverPP2S(10, Karras(), clip=False, eta=1.0)),
        ("dpmpp_2s_ancestral_eta0", DPMSolverPP2S(10, Karras(), clip=False)),
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
    states = []
    watch = lambda i, t, x, x0: states.append(x)  # noqa: E731
    close(solver.sample(denoise, EDMProcess(), Z(expected.shape, 950), noise, watch), expected)
    close(torch.stack(states), tensor("case11_kdiffusion", f"{kind}/{tag}/x_steps"))
    assert len(denoise.times) == load("case11_kdiffusion")[f"{kind}/{tag}/model_calls"]
    if tag != "dpmpp_2s_ancestral_eta0":  # which draws, and multiplies by 0
        assert noise.calls == load("case11_kdiffusion")[f"{kind}/{tag}/noise_calls"]


DPM, EDM_DPM = "DPMSolverMultistepScheduler", "EDMDPMSolverMultistepScheduler"
WHOLE = {"lower_order_final": False}
SDE, KARRAS = {"algorithm_type": "sde-dpmsolver++"}, {"use_karras_sigmas": True}
SHIFTED = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
SCHEDULERS = [
    (DPM, WHOLE | {"solver_order": 1}, DPMSolverPP(order=1), LINEAR),
    (DPM, WHOLE | {"prediction_type": "v_prediction"}, DPMSolverPP(), LINEAR),
    (DPM, WHOLE | KARRAS | {"solver_order": 3}, DPMSolverPP(order=3), LINEAR),
    (DPM, WHOLE | SHIFTED, DPMSolverPP(), FLOW),
    (DPM, WHOLE | SDE | {"solver_order": 1}, DPMSolverPP(order=1, eta=1.0), LINEAR),
    (DPM, WHOLE | SDE, DPMSolverPP(eta=1.0), LINEAR),
    ("DPMSolverSinglestepScheduler", {"use_exponential_sigmas": True}, DPMSolverPP2S(), LINEAR),
    ("UniPCMultistepScheduler", {"solver_order": 1}, UniPC(order=1), LINEAR),
    ("UniPCMultistepScheduler", KARRAS, UniPC(), LINEAR),
    ("UniPCMultistepScheduler", SHIFTED | {"solver_order": 3}, UniPC(order=3), FLOW),
    ("EulerDiscreteScheduler", KARRAS, Euler(), LINEAR),
    ("EulerAncestralDiscreteScheduler", {}, EulerAncestral(), LINEAR),
    ("HeunDiscreteScheduler", {"prediction_type": "sample"}, Heun(), LINEAR),
    ("DDIMScheduler", {"clip_sample": False}, DDIM(), LINEAR),
    ("DDIMScheduler", {"clip_sample": False}, DDIM(eta=1.0), LINEAR),
    ("DDPMScheduler", {"clip_sample": False}, DDPM(FixedSmall()), LINEAR),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, Euler(), FLOW),
    ("EDMEulerScheduler", {}, Euler(), EDM),
    (EDM_DPM, WHOLE, DPMSolverPP(), EDM),
    (EDM_DPM, WHOLE | SDE, DPMSolverPP(eta=1.0), EDM),
    (EDM_DPM, WHOLE | {"solver_order": 3}, DPMSolverPP(order=3), EDM),
]


def scheduler_of(name, options, process, steps=9):
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    betas = {"trained_betas": process.betas.betas().tolist()} if process is LINEAR else {}
    scheduler = getattr(diffusers, name)(**options, **betas)
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize(("name", "options", "solver", "process"), SCHEDULERS)
def test_solvers_equal_diffusers_schedulers_to_their_float32(name, options, solver, process):
    scheduler, solver = scheduler_of(name, options, process), replace(solver, clip=False)
    called = {"eta": solver.eta} if name == "DDIMScheduler" else {}
    theirs, ours = both(
        scheduler, solver, process, mixture_denoiser(process), Z(SHAPE, 1).float(), **called
    )
    assert ours.std() > 0.2
    close(theirs, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_shifted_times_equal_diffusers(shift):
    scheduler = scheduler_of("FlowMatchEulerDiscreteScheduler", {"shift": shift}, FLOW)
    scheduler.set_timesteps(sigmas=Even().grid(FLOW, 9)[:-1].tolist())
    close(scheduler.sigmas, ShiftedGrid(Even(), shift).grid(FLOW, 9), rtol=1e-6)


@pytest.mark.parametrize("process", [EndsInNoise(), FLOW], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [DDPM(FixedSmall(), 9, LogSNR()), DDIM(9, times=Karras()), DPMSolverPP(9, LogSNR())],
    ids=repr,
)
def test_a_grid_that_is_not_finite_is_refused_and_others_are_not(solver, process):
    with pytest.raises(ValueError, match=r"not finite on .* no signal .* use Even or Sections"):
        solver.check(process)
    for times in (Even(), LogSNR(noisiest=-10.0)):
        replace(solver, times=times).check(process)


@pytest.mark.parametrize("process", [COSINE, EDM], ids=repr)
@pytest.mark.parametrize("solver", [*USUAL, Heun(churn=4.0, churn_max=9.0)], ids=repr)
def test_a_watch_sees_every_step_in_order_and_changes_nothing(solver, process):
    solver = replace(solver, steps=7)

    def sampled(*watch):
        denoise = gaussian_denoiser(process)
        return solver.sample(denoise, process, Z(SHAPE, 1), CountedNoise(1), *watch)

    steps_watched = []
    assert torch.equal(sampled(lambda *step: steps_watched.append(step)), sampled())
    steps, times, states, images = zip(*steps_watched, strict=True)
    assert steps == tuple(range(7))
    t = torch.stack([*times, torch.tensor(process.t_clean)])
    assert (t.diff() < 0).all()
    close(t[0], time_grid_of(solver, process).grid(process, 7)[0], rtol=1e-14)
    close(states[0], process.prior(Z(SHAPE, 1), t[0]), rtol=1e-14)
    assert all(x_t.shape == x0.shape == SHAPE for x_t, x0 in zip(states, images, strict=True))
    assert torch.stack(images).abs().max() <= 1  # as clipped


@pytest.mark.parametrize(
    ("solver", "process", "calls"),
    [
        (DPMSolverPP(steps=20), COSINE, 20),
        (DDPM(FixedSmall(), steps=250), COSINE, 250),
        (Heun(steps=18), EDM, 35),
    ],
)
def test_calls_of_a_solver_are_counted_without_a_network(solver, process, calls):
    times = solver_times(solver, process)
    assert len(times) == calls
    assert times[0] == max(times)


def test_the_usual_grids_begin_where_the_process_does_or_at_a_log_snr_of_minus_10():
    for solver in (Heun(), EulerAncestral(), DPMSolverPP(), DPMSolverPP2S(), UniPC()):
        alpha, sigma = COSINE.alpha_sigma(solver_times(solver, COSINE)[0])
        assert 2 * (alpha / sigma).log().item() == pytest.approx(-10)
        # unless the process has more signal
        close(solver_times(solver, EDM)[0], torch.tensor(80.0), rtol=1e-12)
    for solver in (DDIM(), DDPM(FixedSmall()), Euler()):
        close(solver_times(solver, COSINE)[0], torch.tensor(COSINE.t_max), rtol=1e-12)


@pytest.mark.parametrize(
    "process", [COSINE, LINEAR, ContinuousVP(), EDM, FLOW, EndsInNoise()], ids=repr
)
@pytest.mark.parametrize("solver", USUAL, ids=lambda solver: type(solver).__name__)
def test_the_usual_steps_and_grid_come_near_the_data(solver, process):
    """Within 0.1 of a mean of 0.3 and a standard deviation of 0.5, on every process."""
    solver = replace(solver, clip=False)
    start, noise = Z((5000, 1, 1, 1), 1), CountedNoise(1)
    end = solver.sample(gaussian_denoiser(process), process, start, noise)
    is_worse = isinstance(solver, Euler) and process == EDM  # Even in levels up to 80
    assert ((end.std() - 0.5).abs() > 0.1) == is_worse
    assert (end.mean() - 0.3).abs() < 0.1


@pytest.mark.parametrize(
    ("solver", "changes", "message"),
    [
        *((solver, {"steps": 0}, "steps must be at least 1, got 0") for solver in USUAL),
        (DPMSolverPP(), {"order": 4}, "must be"),
        (DPMSolverPP(), {"eta": -1.0}, "must be"),
        (DPMSolverPP2S(), {"eta": 1.5}, "must be"),
        (UniPC(), {"order": 0}, "order must be at least 1, got 0"),
    ],
)
def test_steps_orders_and_noise_without_meaning_are_refused(solver, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(solver, **changes)


@pytest.mark.parametrize("solver", [UniPC(9, Even()), DPMSolverPP2S(9, Even())], ids=repr)
def test_solvers_that_need_signal_are_refused_on_pure_noise(solver):
    for process in (LinearFlow(), EndsInNoise()):
        with pytest.raises(ValueError, match=r"needs alpha > 0, but .* LogSNR\(noisiest=-10\)"):
            solver.check(process)


class CountOperations(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("solver", [DDIM(), DDPM(FixedSmall(), 50), Heun(), DPMSolverPP(), UniPC()])
def test_each_further_step_takes_equally_many_operations(solver):
    def operations(steps):
        with CountOperations() as counter:
            replace(solver, steps=steps).sample(
                gaussian_denoiser(COSINE), COSINE, START, torch.zeros_like
            )
        return counter.num

    fewer, some, more = map(operations, (8, 12, 16))
    assert some - fewer == more - some > 0
