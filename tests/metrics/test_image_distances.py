import numpy as np
import pytest
import torch

from lit_diffusion.metrics.image_distances import (
    MAX_PSNR,
    nearest_neighbors,
    psnr,
)

IMAGES = torch.randint(
    0, 256, (3, 12, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def by_hand(a, b):
    return 10 * np.log10(255**2 / ((a.double() - b.double()) ** 2).mean().item())


def test_psnr_is_of_each_image_by_itself_with_a_range_of_255():
    a, b = IMAGES[0], IMAGES[1]
    expected = [by_hand(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(psnr(a, b), expected, rtol=1e-6)
    assert psnr(a, a).tolist() == [MAX_PSNR] * 12
    one_off = torch.stack([a[0].float() * 0, a[0].float() * 0 + 1]).to(torch.uint8)
    assert psnr(one_off[:1], one_off[1:]).item() == pytest.approx(20 * np.log10(255), rel=1e-6)


def test_nearest_equals_brute_force_in_any_chunks():
    generator = torch.Generator().manual_seed(0)
    images, bank = (
        torch.randint(0, 256, (n, 3, 5, 4), generator=generator).to(torch.uint8) for n in (40, 300)
    )
    distance = (images[:, None].double() - bank[None].double()).flatten(2).norm(dim=-1)
    for chunk in (7, 300, 4096):
        nearest, index = nearest_neighbors(images, bank, chunk)
        assert torch.equal(index, distance.argmin(1))
        torch.testing.assert_close(nearest.double(), distance.min(1).values)


def test_copies_and_nearly_equal_images_have_exact_distances():
    generator = torch.Generator().manual_seed(0)
    bank = torch.randint(0, 256, (60, 3, 64, 64), generator=generator, dtype=torch.uint8)
    bank[1] = bank[0]
    bank[1, 0, 0, 0] ^= 8
    distance, index = nearest_neighbors(bank[:40], bank)
    assert index.tolist() == list(range(40))
    assert not distance.any()
    assert nearest_neighbors(bank[:1], bank[1:])[0].item() == 8
