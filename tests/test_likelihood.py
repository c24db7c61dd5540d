import math

import pytest
import torch
from support.golden import PIX, Z, close, tensor
from support.toy import CountedNoise, gaussian_denoiser, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange, expand_as
from lit_diffusion.grids import Even, Karras, LogSNR, Sections
from lit_diffusion.likelihood import bits_per_dim, flow_bits_per_dim, score
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearBetas,
    LinearFlow,
)
from lit_diffusion.protocols import Denoised

VARIANCES = {
    "fixed_small": FixedSmall(),
    "fixed_large": FixedLarge(),
    "learned_range": LearnedRange(),
}


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", VARIANCES)
def test_bits_per_dimension_equal_improved_diffusion(kind, clip):
    process = DiscreteVP(LinearBetas(50))
    bits = bits_per_dim(
        toy_denoiser(process, kind == "learned_range"),
        process,
        PIX((2, 3, 8, 8), 401),
        VARIANCES[kind],
        Sections(),
        50,
        CountedNoise(400),
        clip,
    )
    for actual, name in [
        (bits.terms, "vb"),
        (bits.x0_mse, "xstart_mse"),
        (bits.noise_mse, "mse"),
        (bits.total, "total_bpd"),
        (bits.prior, "prior_bpd"),
    ]:
        close(actual, tensor("case04_nll", f"{kind}/clip{int(clip)}/{name}_f64"))


def test_the_prior_term_measures_from_the_start_of_sampling():
    """Of EDM that is N(0, sigma_max^2), so x0 / sigma_max is all that is left of the image."""
    process, x0 = EDMProcess(), PIX((2, 3, 8, 8), 401)
    bits = bits_per_dim(
        gaussian_denoiser(process), process, x0, FixedSmall(), Karras(), 5, CountedNoise(400)
    )
    close(bits.prior, x0.square().flatten(1).mean(1) / (2 * 80**2 * math.log(2)))
    assert torch.equal(bits.total, bits.terms.sum(1) + bits.prior)


def test_a_bound_on_a_grid_that_is_not_finite_is_refused():
    process = LinearFlow()
    with pytest.raises(ValueError, match=r"not finite on .* use Even or Sections"):
        bits_per_dim(gaussian_denoiser(process), process, X0, FixedSmall(), LogSNR(), 5)


FLOWS = [DiscreteVP(CosineBetas(1000)), ContinuousVP(), EDMProcess(), LinearFlow()]
GRID = LogSNR(noisiest=-12.0)
X0 = 0.5 * Z((3, 1, 2, 2), 7)


def expected_bits(x0, std):
    """-log2 of the density N(0, std^2), per dimension."""
    bits = -torch.distributions.Normal(0.0, std).log_prob(x0) / math.log(2)
    return bits.flatten(1).mean(1)


@pytest.mark.quick
@pytest.mark.parametrize("process", FLOWS, ids=repr)
@pytest.mark.parametrize("probes", [None, 1])
def test_the_flow_finds_the_density_of_a_gaussian(process, probes):
    """By the whole trace, and by signs, which are exact for a diagonal Jacobian."""
    denoise = gaussian_denoiser(process, mean=0.0, std=0.5)
    bits = flow_bits_per_dim(denoise, process, X0, GRID, 100, probes, CountedNoise(1))
    close(bits, expected_bits(X0, 0.5), rtol=0, atol=1e-3)


def test_the_density_is_the_same_where_a_trainer_validates():
    process = LinearFlow()
    denoise = gaussian_denoiser(process, mean=0.0, std=0.5)
    with torch.inference_mode():
        within = flow_bits_per_dim(denoise, process, X0.clone(), GRID, 5)
    close(within, flow_bits_per_dim(denoise, process, X0, GRID, 5))


@pytest.mark.parametrize(
    ("times", "steps", "probes", "message"),
    [
        (Even(), 10, 1, r"two times or more, .* LogSNR\(noisiest=-12"),
        (GRID, 1, 1, "two times or more"),
        (GRID, 10, 0, "probes must be at least 1, or None .* got 0"),
    ],
)
def test_a_flow_from_pure_noise_or_without_steps_or_probes_is_refused(
    times, steps, probes, message
):
    process = LinearFlow()
    with pytest.raises(ValueError, match=message):
        flow_bits_per_dim(gaussian_denoiser(process), process, X0, times, steps, probes)


def correlated(process):
    """The exact denoiser of (a, a + b) with a and b normal, which mixes its two dimensions."""
    cov = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64) / 4

    def denoise(x, t):
        alpha, sigma = (v.reshape(-1, 1, 1) for v in process.alpha_sigma(t))
        gain = alpha * cov @ torch.linalg.inv(alpha**2 * cov + sigma**2 * torch.eye(2))
        x0 = (gain @ x.flatten(1)[:, :, None]).view_as(x)
        return Denoised(x0, (x - expand_as(alpha, x) * x0) / expand_as(sigma, x))

    return denoise, torch.distributions.MultivariateNormal(torch.zeros(2).double(), cov)


def test_random_signs_find_the_trace_of_a_full_jacobian_on_average():
    process = ContinuousVP()
    denoise, data = correlated(process)
    x0 = 0.5 * Z((1, 1, 1, 2), 4).expand(400, -1, -1, -1)
    exact = -data.log_prob(x0[:1].flatten(1)) / 2 / math.log(2)
    whole = flow_bits_per_dim(denoise, process, x0[:1], GRID, 40, None)
    close(whole, exact, rtol=0, atol=1e-3)
    generator = torch.Generator().manual_seed(0)
    noise = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    guessed = flow_bits_per_dim(denoise, process, x0, GRID, 40, 1, noise)
    assert guessed.std() > 0.01
    assert abs(guessed.mean() - exact) < 4 * guessed.std() / 20 + 1e-3
    steadier = flow_bits_per_dim(denoise, process, x0, GRID, 40, 8, noise)
    assert steadier.std() < 0.4 * guessed.std()


def test_the_score_points_up_the_density():
    process = ContinuousVP()
    x, t = Z((4, 1, 2, 2), 1), torch.full((4,), 0.4).double()
    alpha, sigma = process.alpha_sigma(t[0])
    variance = (alpha * 0.5) ** 2 + sigma**2
    close(score(gaussian_denoiser(process), process)(x, t), (alpha * 0.3 - x) / variance)
