import numpy as np
import pytest
import torch

from lit_diffusion.metrics.psnr import CAP, psnr, psnr_of_all

IMAGES = torch.randint(
    0, 256, (3, 12, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def by_hand(a, b):
    return 10 * np.log10(255**2 / ((a.double() - b.double()) ** 2).mean().item())


def test_psnr_is_of_each_image_by_itself_with_a_range_of_255():
    a, b = IMAGES[0], IMAGES[1]
    expected = [by_hand(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(psnr(a, b), expected, rtol=1e-6)
    assert psnr(a, a).tolist() == [CAP] * 12
    one_off = torch.stack([a[0].float() * 0, a[0].float() * 0 + 1]).to(torch.uint8)
    assert psnr(one_off[:1], one_off[1:]).item() == pytest.approx(20 * np.log10(255), rel=1e-6)


def test_each_of_one_set_stands_beside_each_of_the_other():
    a, b = IMAGES[0], IMAGES[1].clone()
    b[2] = a[5]
    found = psnr_of_all(a, b)
    torch.testing.assert_close(found.diagonal(), psnr(a, b))
    assert found[3, 7].item() == pytest.approx(by_hand(a[3], b[7]))
    assert found[5, 2] == CAP
