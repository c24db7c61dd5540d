import numpy as np
import pytest
import torch

from lit_diffusion.metrics.image_distances import (
    MAX_PSNR,
    Memorization,
    nearest_neighbors,
    pairwise_psnr,
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


def test_each_of_one_set_stands_beside_each_of_the_other():
    a, b = IMAGES[0], IMAGES[1].clone()
    b[2] = a[5]
    found = pairwise_psnr(a, b)
    torch.testing.assert_close(found.diagonal(), psnr(a, b))
    assert found[3, 7].item() == pytest.approx(by_hand(a[3], b[7]))
    assert found[5, 2] == MAX_PSNR


def noise(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 6, 4, generator=generator)


def test_copies_are_told_from_new_images():
    memorization = Memorization.fit(noise(300, 0), noise(300, 1))
    assert memorization.rate(noise(300, 0)) == 1
    assert 0.35 < memorization.rate(noise(300, 2)) < 0.65
    assert memorization.rate(noise(300, 2) + 3) == 0


def test_nearest_equals_brute_force_in_any_chunks():
    generator = torch.Generator().manual_seed(0)
    images, bank = (
        torch.randint(0, 256, (n, 3, 5, 4), generator=generator).to(torch.uint8) for n in (40, 300)
    )
    distance = (images[:, None].double() - bank[None].double()).flatten(2).norm(dim=-1)
    for chunk in (7, 300, 4096):
        found, index = nearest_neighbors(images, bank, chunk)
        assert torch.equal(index, distance.argmin(1))
        torch.testing.assert_close(found.double(), distance.min(1).values)


def test_usual_is_the_median_distance_and_as_near_counts():
    held_out = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]).view(5, 1)
    memorization = Memorization.fit(torch.zeros(1, 1), held_out)
    assert memorization.rate(torch.tensor([[2.9], [3.0], [3.1], [9.0]])) == 0.5
    exact = Memorization.fit(held_out, held_out)
    assert exact.rate(held_out) == 1
