import math

import pytest
import torch
from support.golden import PIX, close, tensor
from support.toy import CountedNoise, gaussian_denoiser, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange
from lit_diffusion.likelihood import bits_per_dim
from lit_diffusion.processes import DiscreteVP, EDMProcess, LinearBetas
from lit_diffusion.timesteps import Karras, Sections

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
