import pytest
import torch
from support.golden import PIX, Z, close, load, tensor
from support.toy import (
    CountedNoise,
    EndsInNoise,
    LinearFlow,
    gaussian_denoiser,
    gaussian_flow,
    toy_denoiser,
)

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange, expand_as
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
)
from lit_diffusion.protocols import Denoised
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Heun
from lit_diffusion.timesteps import Even, Karras, LogSNR, Sections, Stride

SHAPE = (2, 3, 4, 4)
COSINE, LINEAR = DiscreteVP(CosineBetas(1000)), DiscreteVP(LinearBetas(1000))
LOOPS = {
    "anc_lin50_fixed_small": (DiscreteVP(LinearBetas(50)), DDPM(FixedSmall(), 50)),
    "anc_lin50_fixed_large": (DiscreteVP(LinearBetas(50)), DDPM(FixedLarge(), 50)),
    "anc_lin50_learned_range": (DiscreteVP(LinearBetas(50)), DDPM(LearnedRange(), 50)),
    "anc_cos1000_25_fixed_large": (COSINE, DDPM(FixedLarge(), 25)),
    "anc_cos1000_25_learned_range": (COSINE, DDPM(LearnedRange(), 25)),
    "ddim_cos1000_10_eta0": (COSINE, DDIM(10, times=Stride())),
    "ddim_cos1000_10_eta0.5": (COSINE, DDIM(10, eta=0.5, times=Stride())),
    "ddim_lin1000_10_eta0": (LINEAR, DDIM(10, times=Stride())),
    "ddim_lin1000_10_eta1": (LINEAR, DDIM(10, eta=1.0, times=Stride())),
}


class Recorder:
    """Remembers the states and times at which a denoiser was asked."""

    def __init__(self, denoise):
        self.denoise, self.states, self.times, self.first = denoise, [], [], None

    def __call__(self, x, t):
        self.states.append(x)
        self.times.append(t[0].item())
        seen = self.denoise(x, t)
        self.first = seen if self.first is None else self.first
        return seen


def with_clip(solver, clip):
    return type(solver)(**{**vars(solver), "clip": clip})


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("tag", LOOPS)
def test_trajectories_equal_improved_diffusion(tag, clip):
    process, solver = LOOPS[tag]
    denoise = Recorder(toy_denoiser(process, "learned_range" in tag))
    end = with_clip(solver, clip).sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
    states = [*denoise.states[1:], end]  # the state after each executed step
    key = f"{tag}/clip{int(clip)}"
    for step, expected in zip(
        load("case03_sampling")[f"{tag}/snap_steps"],
        tensor("case03_sampling", f"{key}/x_f64"),
        strict=True,
    ):
        close(states[step], expected)
    assert denoise.times == tensor("case03_sampling", f"{tag}/t_seen").tolist()
    x0 = denoise.first.x0.clamp(-1, 1) if clip else denoise.first.x0
    close(x0, tensor("case03_sampling", f"{key}/pred_xstart0_f64"))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("tag", "process"), [("lin1000", LINEAR), ("cos1000", COSINE)])
def test_ddim_inversion_equals_improved_diffusion(tag, process, clip):
    denoise = Recorder(toy_denoiser(process))
    solver = DDIM(10, times=Stride(), clip=clip)
    noise = solver.invert(denoise, process, 0.9 * PIX(SHAPE, 101))
    key = f"ddimrev_{tag}_10"
    states = [*denoise.states[1:], noise]
    for step, expected in zip(
        load("case03_sampling")[f"{key}/snap_steps"],
        tensor("case03_sampling", f"{key}/clip{int(clip)}/x_f64"),
        strict=True,
    ):
        close(states[step], expected)


def test_networks_are_told_rescaled_times_when_asked():
    process = DiscreteVP(LinearBetas(50), rescale_labels=True)
    denoise = Recorder(toy_denoiser(process, label=process.noise_label))
    end = DDPM(FixedLarge(), 50).sample(denoise, process, Z(SHAPE, 100), CountedNoise(200))
    expected = tensor("case03_sampling", "rescale_lin50/x_f32")[-1]  # float32 only in the reference
    close(end.float(), expected, rtol=1e-4, atol=2e-5 * max(1, expected.abs().max().item()))
    t_seen = tensor("case03_sampling", "rescale_lin50/t_seen")
    close(process.noise_label(torch.tensor(denoise.times)), t_seen, rtol=1e-6)
    for tag, betas in [("cos1000", CosineBetas(1000)), ("cos4000", CosineBetas(4000))]:
        process = DiscreteVP(betas, rescale_labels=True)
        told = process.noise_label(Sections().grid(process, 25)[:-1])
        close(told, tensor("case03_sampling", f"rescale_{tag}_25/t_seen"))


def no_noise(x):
    raise AssertionError("a deterministic solver drew noise")


@pytest.mark.parametrize("process", [COSINE, LINEAR, ContinuousVP(), EDMProcess()], ids=repr)
@pytest.mark.parametrize(("solver", "order"), [(DDIM, 1), (DPMSolverPP, 2), (Heun, 2)])
def test_error_falls_with_the_order_of_the_solver(solver, order, process):
    """Data N(0.3, 0.5^2): the exact end of the flow is known, and halving the step divides the
    error by 2^order."""
    start = Z(SHAPE, 950)
    noisiest = torch.tensor(process.t_max, dtype=torch.float64)
    exact = gaussian_flow(process, process.prior(start, noisiest), process.t_max)
    errors = []
    for steps in (40, 80, 160):
        end = solver(steps, times=LogSNR(), clip=False).sample(
            gaussian_denoiser(process), process, start, no_noise
        )
        errors.append((end - exact).abs().max().item())
    observed = torch.tensor(errors).log2().diff().neg()
    assert (observed > order - 0.25).all(), (errors, observed)


def test_steps_before_a_log_snr_of_minus_10_are_wasted():
    """Of 20 steps over cosine betas they are a third: without them the error is much smaller."""
    start = Z(SHAPE, 950)
    exact = gaussian_flow(COSINE, start, COSINE.t_max)

    def error(times):
        denoise = gaussian_denoiser(COSINE)
        end = DPMSolverPP(20, times, clip=False).sample(denoise, COSINE, start, no_noise)
        return (end - exact).abs().max()

    assert error(LogSNR(noisiest=-10.0)) < 0.7 * error(LogSNR())


def test_ancestral_sampling_reproduces_the_data_distribution():
    process = DiscreteVP(CosineBetas(200))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(20000, 1, 1, 1, generator=generator, dtype=torch.float64)
    end = DDPM(FixedSmall(), 200, clip=False).sample(
        gaussian_denoiser(process),
        process,
        start,
        lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype),
    )
    assert end.mean().item() == pytest.approx(0.3, abs=4 * 0.5 / 20000**0.5)
    assert end.std().item() == pytest.approx(0.5, rel=0.02)


def test_ddim_with_eta_one_is_ddpm_with_the_small_variance():
    denoise = toy_denoiser(COSINE)
    ends = [
        solver.sample(denoise, COSINE, Z(SHAPE, 100), CountedNoise(200))
        for solver in (DDIM(25, eta=1.0), DDPM(FixedSmall(), 25))
    ]
    close(ends[0], ends[1])


def test_inversion_leads_back_to_the_image():
    solver = DDIM(500, clip=False)
    x0 = 0.3 + 0.5 * Z(SHAPE, 7)
    denoise = gaussian_denoiser(COSINE)
    again = solver.sample(denoise, COSINE, solver.invert(denoise, COSINE, x0), no_noise)
    assert (again - x0).abs().max() < 0.02


def k_diffusion_data(kind):
    """The exact denoisers of golden case 11, for alpha = 1."""

    def denoise(x, t):
        sigma = expand_as(t, x)
        if kind == "gauss":
            x0 = x * 0.25 / (0.25 + sigma**2)
        else:
            q = 0.04 + sigma**2
            x0 = (0.04 * x + sigma**2 * 0.5 * torch.tanh(0.5 * x / q)) / q
        return Denoised(x0, (x - x0) / sigma)

    return denoise


class NoiseOfStep:
    """Hands out Z(shape, first + n) in the n-th step of a solver with two evaluations a step."""

    def __init__(self, first, denoise):
        self.first, self.denoise = first, denoise

    def __call__(self, x):
        return Z(x.shape, self.first + len(self.denoise.times) // 2)


@pytest.mark.parametrize("kind", ["gauss", "mix"])
@pytest.mark.parametrize(
    ("tag", "solver"),
    [
        ("dpmpp_2m", DPMSolverPP(10, Karras(), clip=False)),
        ("dpmpp_2m_n20", DPMSolverPP(20, Karras(), clip=False)),
        ("euler", DDIM(10, times=Karras(), clip=False)),
        ("euler_ancestral", DDIM(10, eta=1.0, times=Karras(), clip=False)),
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


@pytest.mark.parametrize("kind", ["gauss", "mix"])
def test_churned_heun_equals_k_diffusion(kind):
    solver = Heun(10, clip=False, churn=5.0, churn_min=0.05, churn_max=50.0, churn_noise=1.003)
    denoise = Recorder(k_diffusion_data(kind))
    expected = tensor("case11_kdiffusion", f"{kind}/heun_churn/final")
    start, noise = Z(expected.shape, 950), NoiseOfStep(960, denoise)
    close(solver.sample(denoise, EDMProcess(), start, noise), expected)


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


@pytest.mark.parametrize(
    "solver",
    [Heun(12, LogSNR(), clip=False), Heun(12, LogSNR(), clip=False, churn=3.0, churn_max=10.0)],
    ids=["heun", "churned"],
)
def test_heun_takes_the_same_way_through_any_process_of_the_same_levels(solver):
    """x_t / alpha obeys one equation, whatever alpha is; the clean image is alike in both."""
    vp = ContinuousVP(t_min=1e-3)
    alpha, sigma = vp.alpha_sigma(torch.tensor([vp.t_min, vp.t_max], dtype=torch.float64))
    edm = EDMProcess(*(sigma / alpha).tolist())
    denoise = k_diffusion_data("mix")

    def scaled(x, t):
        alpha, sigma = vp.alpha_sigma(t)
        return denoise(x / expand_as(alpha, x), sigma / alpha)

    start = Z(SHAPE, 1)
    ends = [
        solver.sample(denoise, edm, start / sigma[1], CountedNoise(2)),
        solver.sample(scaled, vp, start, CountedNoise(2)),
    ]
    close(ends[0], ends[1])


def test_a_churned_solver_reproduces_the_data_distribution():
    process = EDMProcess(0.002, 20.0)
    generator = torch.Generator().manual_seed(0)

    def randn_like(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    start = randn_like(torch.empty(20000, 1, 1, 1, dtype=torch.float64))
    end = Heun(40, clip=False, churn=10.0).sample(
        gaussian_denoiser(process), process, start, randn_like
    )
    assert end.mean().item() == pytest.approx(0.3, abs=4 * 0.5 / 20000**0.5)
    assert end.std().item() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("process", [COSINE, EDMProcess()], ids=repr)
def test_a_clipped_solver_ends_within_the_range_of_pixels(process):
    denoise = gaussian_denoiser(process, mean=0.9)
    for churn in (0.0, 10.0):
        solver = Heun(10, churn=churn)
        end = solver.sample(denoise, process, Z(SHAPE, 1), CountedNoise(1))
        assert end.abs().max() <= 1 + 1e-9
        assert end.max() > 0.99


def test_levels_are_not_raised_beyond_the_noisiest_step():
    denoise = Recorder(gaussian_denoiser(COSINE))
    Heun(10, churn=10.0, clip=False).sample(denoise, COSINE, Z(SHAPE, 1), CountedNoise(1))
    assert max(denoise.times) == COSINE.t_max


def test_heun_is_refused_where_the_image_is_lost():
    process = EndsInNoise()
    for times in (Karras(), Sections()):
        with pytest.raises(ValueError, match=r"needs alpha > 0, which .* use DDIM"):
            Heun(5, times).check(process)
    with pytest.raises(ValueError, match="churn must be >= 0, got -1"):
        Heun(churn=-1.0)


@pytest.mark.parametrize("process", [EndsInNoise(), LinearFlow()], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [DDPM(FixedSmall(), 9, LogSNR()), DDIM(9, times=Karras()), DPMSolverPP(9)],
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


@pytest.mark.parametrize("process", [EDMProcess(), ContinuousVP()], ids=repr)
@pytest.mark.parametrize("solver", [DDIM(), DDPM(FixedSmall())], ids=repr)
def test_solvers_in_whole_steps_ask_for_another_grid_in_continuous_time(solver, process):
    with pytest.raises(ValueError, match=r"discrete steps.*use LogSNR or Karras"):
        solver.check(process)
    type(solver)(**{**vars(solver), "times": LogSNR()}).check(process)


@pytest.mark.parametrize("solver", [DDIM, DPMSolverPP, Heun])
def test_a_solver_without_steps_is_refused(solver):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        solver(steps=0)


def test_more_noise_than_there_is_is_refused():
    with pytest.raises(ValueError, match="eta"):
        DDIM(eta=-1.0)
    with pytest.raises(ValueError, match="eta = 30"):
        DDIM(50, eta=30.0).sample(toy_denoiser(COSINE), COSINE, Z(SHAPE, 1), CountedNoise(1))
