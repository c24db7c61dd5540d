import pytest
from support.golden import PIX, close, tensor
from support.toy import CountedNoise, toy_denoiser

from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange
from lit_diffusion.likelihood import bits_per_dim
from lit_diffusion.processes import DiscreteVP, LinearBetas
from lit_diffusion.timesteps import Sections

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
