import pytest
import torch

from lit_diffusion.codecs import PixelCodec


def test_all_levels_survive_the_round_trip():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x0 = PixelCodec().encode(levels)
    assert (x0.min(), x0.max(), x0.dtype) == (-1, 1, torch.float32)
    assert torch.equal(PixelCodec().decode(x0), levels)


def test_values_outside_the_range_are_clamped_and_never_wrap():
    x0 = torch.linspace(-3, 3, 4001)
    levels = PixelCodec().decode(x0).int()
    assert (levels.diff() >= 0).all()
    assert (levels[x0 <= -1] == 0).all()
    assert (levels[x0 >= 1] == 255).all()


def test_decoding_rounds_to_the_nearest_level():
    x0 = torch.rand(10000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    error = (PixelCodec().encode(PixelCodec().decode(x0)) - x0).abs()
    assert error.max() <= 0.5 / 127.5 + 1e-6


def test_images_that_are_not_uint8_are_refused():
    with pytest.raises(TypeError, match="must be uint8"):
        PixelCodec().encode(torch.rand(1, 3, 4, 4))
