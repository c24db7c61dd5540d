import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.golden import close, load, tensor
from support.toy import EndsInNoise

from lit_diffusion.gaussian import posterior
from lit_diffusion.grids import Even, Karras, LogSNR, Sections, ShiftedGrid, Stride
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
    LinearFlow,
    SigmoidBetas,
)
from lit_diffusion.solvers import DDIM, DPMSolverPP
from lit_diffusion.timesteps import (
    Antithetic,
    Independent,
    LogitNormal,
    LogNormal,
    Shifted,
    Stratified,
    Uniform,
    bin_of,
    draw_uniforms,
)

COSINE = DiscreteVP(CosineBetas(1000))
DRAWS = [Independent(), Stratified(), Antithetic()]

RESPACINGS = {
    "lin1000_250": (LinearBetas(1000), Sections(), 250),
    "cos4000_250": (CosineBetas(4000), Sections(), 250),
    "cos4000_ddim50": (CosineBetas(4000), Stride(), 50),
    "lin1000_ddim50": (LinearBetas(1000), Stride(), 50),
    "cos4000_ddim250": (CosineBetas(4000), Stride(), 250),
    "cos1000_25": (CosineBetas(1000), Sections(), 25),
    "lin300_10_15_20": (LinearBetas(300), Sections((10, 15, 20)), 45),
    "lin1000_str_10_10_10_10": (LinearBetas(1000), Sections((10, 10, 10, 10)), 40),
    "lin25_3_2_1": (LinearBetas(25), Sections((3, 2, 1)), 6),
}


@pytest.mark.parametrize("tag", RESPACINGS)
def test_respaced_grids_equal_improved_diffusion(tag):
    betas, times, steps = RESPACINGS[tag]
    process = DiscreteVP(betas)
    grid = times.grid(process, steps)
    assert grid[:-1].flip(0).tolist() == tensor("case01_respacing", f"{tag}/steps").tolist()
    assert grid[-1] == process.t_clean
    respaced = posterior(process, grid)
    alpha, _ = process.alpha_sigma(grid[:-1].flip(0))
    for actual, name in [
        (respaced.log_beta.exp().flip(0), "betas"),
        (alpha**2, "alphas_cumprod"),
        (respaced.log_variance.flip(0), "posterior_log_variance_clipped"),
    ]:
        close(actual, tensor("case01_respacing", f"{tag}/{name}"), rtol=1e-9, atol=1e-14)


def test_strides_exist_for_just_the_numbers_that_the_reference_accepts():
    for num_steps, steps, accepted in load("case01_respacing")["ddim_validity"].tolist():
        process = DiscreteVP(CosineBetas(num_steps))
        if accepted:
            assert len(Stride().grid(process, steps)) == steps + 1
        else:
            with pytest.raises(ValueError, match="no integer stride"):
                Stride().grid(process, steps)
    assert Stride().grid(DiscreteVP(CosineBetas(9)), 9).tolist() == [*range(8, -1, -1), -1]


@pytest.mark.parametrize(("noisiest", "first"), [(-10.0, None), (-50.0, 999), (-math.inf, 999)])
def test_log_snr_grid_is_even_and_starts_no_noisier_than_asked(noisiest, first):
    process = DiscreteVP(CosineBetas(1000))
    grid = LogSNR(noisiest).grid(process, 20)
    alpha, sigma = process.alpha_sigma(grid[:-1])
    log_snr = 2 * (alpha / sigma).log()
    close(log_snr.diff(), log_snr.diff().mean().expand(19), rtol=1e-6)
    assert log_snr[0].item() == pytest.approx(noisiest) if first is None else grid[0] == first
    assert (grid[-2], grid[-1]) == (0, -1)


@pytest.mark.parametrize(
    ("grid", "process", "case", "key"),
    [
        (Karras(), EDMProcess(), "case07_edm", "heun18/t_steps"),
        (Karras(5.0), EDMProcess(0.02, 10.0), "case07_edm", "heun5/t_steps"),
        (Karras(), EDMProcess(), "case11_kdiffusion", "sigmas_f64"),
        (Karras(), EDMProcess(), "case11_kdiffusion", "sigmas_f64_n20"),
        (LogSNR(), EDMProcess(), "case11_kdiffusion", "sigmas_exp_n10_f64"),
    ],
)
def test_grids_of_noise_levels_equal_edm_and_k_diffusion(grid, process, case, key):
    sigmas = tensor(case, key)
    close(grid.grid(process, len(sigmas) - 1), sigmas, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    "process", [EDMProcess(), ContinuousVP(), DiscreteVP(CosineBetas(1000))], ids=repr
)
def test_karras_grid_is_even_in_a_power_of_the_level_on_any_process(process):
    grid = Karras(3.0).grid(process, 20)
    alpha, sigma = process.alpha_sigma(grid[:-1])
    gaps = ((sigma / alpha) ** (1 / 3)).diff()
    close(gaps, gaps.mean().expand(19), rtol=1e-6)
    close(grid[[0, -2, -1]], torch.tensor([process.t_max, process.t_min, process.t_clean]))


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize(
    "grid",
    [Sections(), Stride(), LogSNR(), LogSNR(noisiest=-10.0), Karras(), Karras(2.0), Even()],
    ids=repr,
)
@pytest.mark.parametrize(
    "process",
    [
        DiscreteVP(CosineBetas(1000)),
        DiscreteVP(LinearBetas(100)),
        DiscreteVP(SigmoidBetas(40)),
        ContinuousVP(),
        EDMProcess(),
        EndsInNoise(),
        LinearFlow(),
    ],
    ids=repr,
)
def test_grids_fall_from_the_noisy_end_to_the_clean_time_or_are_refused(process, grid, steps):
    if process.num_steps is None and isinstance(grid, Sections | Stride):
        with pytest.raises(ValueError, match=r"discrete steps, got .*; use Even, LogSNR or Karras"):
            grid.grid(process, steps)
        return
    times = grid.grid(process, steps)
    assert (times.shape, times.dtype) == ((steps + 1,), torch.float64)
    assert times[-1] == process.t_clean
    lost = process.alpha_sigma(torch.tensor([process.t_max], dtype=torch.float64))[0] == 0
    if lost and steps > 1 and grid in (LogSNR(), Karras(), Karras(2.0)):
        with pytest.raises(ValueError, match="has times that are not finite on"):
            DDIM(steps, times=grid).check(process)
    else:
        assert times.isfinite().all()
        assert (times.diff() < 0).all()
        assert times[0] <= process.t_max * (1 + 1e-9)


@pytest.mark.parametrize("process", [EDMProcess(), ContinuousVP()], ids=repr)
def test_log_normal_levels_have_normal_logarithms(process):
    z = torch.linspace(-3, 3, 7, dtype=torch.float64)
    t = LogNormal(-0.4, 1.0).quantile(torch.special.ndtr(z), process)
    alpha, sigma = process.alpha_sigma(t)
    close((sigma / alpha).log(), -0.4 + z)


@pytest.mark.parametrize(
    "process", [EDMProcess(), ContinuousVP(), DiscreteVP(LinearBetas(50))], ids=repr
)
def test_log_normal_levels_rise_with_u_and_stay_within_the_process(process):
    u = torch.linspace(0, 1, 1000, dtype=torch.float64).clamp(max=1 - 2**-53)
    t = LogNormal(0.0, 3.0).quantile(u, process)
    assert (t.diff() >= 0).all()
    assert (t[0], t[-1]) == (process.t_min, process.t_max)
    if process.num_steps is not None:
        assert set(t.tolist()) == set(range(50))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogNormal(std=0.0), "std must be > 0, got 0"),
        (lambda: LogNormal(mean=math.nan), "mean must be finite, got nan"),
        (lambda: Shifted(Uniform(), math.inf), "shift must be > 0, got inf"),
        (lambda: ShiftedGrid(Even(), 0.0), "shift must be > 0, got 0"),
        (lambda: Karras(-7.0), "rho must be > 0, got -7"),
        (lambda: LogSNR(20.0).grid(COSINE, 9), r"noisiest must be below 10\.09.*-10 is usual"),
        (lambda: LogSNR(math.nan).grid(COSINE, 9), "noisiest must be below"),
        (lambda: Sections((3, 3)).grid(COSINE, 61), "add up"),
        (lambda: Sections((600, 1)).grid(COSINE, 601), "can't be split"),
        (
            lambda: DPMSolverPP(20, ShiftedGrid(LogSNR(), 4.0)).check(EDMProcess()),
            "do not decrease",
        ),
    ],
)
def test_distributions_and_grids_without_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def chi_square(counts, expected):
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("rule", DRAWS)
def test_draws_follow_the_density(rule):
    density = torch.tensor([1.0, 4.0, 0.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    draws = [draw_uniforms(64, density, rule, generator=generator) for _ in range(500)]
    counts = np.bincount(bin_of(torch.cat(draws), 5).numpy(), minlength=5)
    expected = 32000 * density.numpy() / 10
    assert counts[2] == 0
    keep = expected > 0
    assert chi_square(counts[keep], expected[keep]) < 16.3  # 0.1% point of chi-square with 3 df


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 7, 8])
@pytest.mark.parametrize("rule", DRAWS)
def test_each_position_of_a_batch_is_uniform(rule, n):
    generator = torch.Generator().manual_seed(1)
    batches = torch.stack([draw_uniforms(n, None, rule, generator=generator) for _ in range(4000)])
    for position in (0, n // 2, n - 1):
        counts = np.bincount(bin_of(batches[:, position], 10).numpy(), minlength=10)
        assert chi_square(counts, np.full(10, 400.0)) < 33.7  # 0.01% point, 9 df


@pytest.mark.parametrize("rule", DRAWS)
def test_draws_are_uniforms_and_repeat_with_the_generator(rule):
    def drawn(seed):
        return draw_uniforms(9, None, rule, generator=torch.Generator().manual_seed(seed))

    u = drawn(0)
    assert u.dtype == torch.float64
    assert u.shape == (9,)
    assert 0 <= u.min() <= u.max() < 1
    assert torch.equal(u, drawn(0))
    assert not torch.equal(u, drawn(1))


@pytest.mark.parametrize("n", [6, 7])
def test_antithetic_draws_are_pairs_that_sum_to_one_and_an_odd_one_is_alone(n):
    u = draw_uniforms(n, None, Antithetic(), generator=torch.Generator().manual_seed(0))
    pairs = n // 2
    torch.testing.assert_close(u[:pairs] + u[n - pairs :], torch.ones(pairs).double())
    assert len(set(u.tolist())) == n


@pytest.mark.parametrize("rule", DRAWS)
@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53])
def test_the_least_and_the_largest_random_numbers_give_uniforms(monkeypatch, rule, extreme):
    full = torch.full
    monkeypatch.setattr(torch, "rand", lambda n, **_: full((n,), extreme, dtype=torch.float64))
    for density in (None, torch.ones(1000), torch.tensor([0.3, 0.3, 0.1])):
        u = draw_uniforms(128, density, rule)
        assert 0 <= u.min() <= u.max() < 1


def test_the_largest_uniform_is_drawn_from_a_bin_with_density():
    generator = torch.Generator().manual_seed(5)
    largest = SimpleNamespace(uniforms=lambda n, *_: torch.ones(n).double() - 2**-53)
    for num_bins in range(10, 1010, 10):
        density = torch.rand(num_bins, dtype=torch.float64, generator=generator)
        density[num_bins // 2 :] = 0
        u = draw_uniforms(1, density, largest)
        assert bin_of(u, num_bins).item() == num_bins // 2 - 1


def test_stratified_draws_put_one_in_each_stratum():
    for density in (None, torch.tensor([0.2, 0.8, 0.1])):
        u = draw_uniforms(128, density, generator=torch.Generator().manual_seed(2))
        if density is not None:  # back to the uniform under the density
            cdf = torch.cat([torch.zeros(1), (density / density.sum()).cumsum(0)]).double()
            index = bin_of(u, 3)
            u = cdf[index] + (u * 3 - index) * (cdf[index + 1] - cdf[index])
        assert (u * 128).long().sort().values.tolist() == list(range(128))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_density_can_be_drawn_from_with_deterministic_algorithms(device, deterministic):
    density = torch.tensor([0.0, 1.0, 3.0], device=device)
    u = draw_uniforms(64, density, device=device)
    assert np.bincount(bin_of(u, 3).tolist(), minlength=3).tolist() == [0, 16, 48]


def test_logit_normal_times_of_flow_have_normal_logits():
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    t = LogitNormal(mean=0.5, std=0.8).quantile(u, LinearFlow())
    close((torch.logit(t) - 0.5) / 0.8, torch.special.ndtri(u))


@pytest.mark.parametrize("process", [ContinuousVP(), EDMProcess(), LinearFlow(), COSINE], ids=repr)
def test_shifted_times_have_a_multiple_of_the_noise_on_any_process(process):
    u = torch.linspace(0.2, 0.7, 20, dtype=torch.float64)
    levels = []
    for times in (Uniform(), Shifted(Uniform(), 2.0)):
        alpha, sigma = process.alpha_sigma(times.quantile(u, process))
        levels.append(sigma / alpha)
    close(levels[1], 2 * levels[0], rtol=1e-9 if process.num_steps is None else 0.01)
    if process.num_steps is not None:
        t = Shifted(Uniform(), 2.0).quantile(u, process)
        assert torch.equal(t, t.round())
