import torch

from lit_diffusion.metrics.copies import Copies, nearest


def noise(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 6, 4, generator=generator)


def test_copies_are_told_from_new_images():
    copies = Copies.beside(bank=noise(300, 0), held_out=noise(300, 1))
    assert copies.share(noise(300, 0)) == 1
    assert 0.35 < copies.share(noise(300, 2)) < 0.65
    assert copies.share(noise(300, 2) + 3) == 0


def test_nearest_equals_brute_force_in_any_chunks():
    generator = torch.Generator().manual_seed(0)
    images, bank = (
        torch.randint(0, 256, (n, 3, 5, 4), generator=generator).to(torch.uint8) for n in (40, 300)
    )
    distance = (images[:, None].double() - bank[None].double()).flatten(2).norm(dim=-1)
    for chunk in (7, 300, 4096):
        found, index = nearest(images, bank, chunk)
        assert torch.equal(index, distance.argmin(1))
        torch.testing.assert_close(found.double(), distance.min(1).values)


def test_usual_is_the_median_distance_and_as_near_counts():
    held_out = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]).view(5, 1)
    copies = Copies.beside(bank=torch.zeros(1, 1), held_out=held_out)
    assert copies.share(torch.tensor([[2.9], [3.0], [3.1], [9.0]])) == 0.5
    exact = Copies.beside(bank=held_out, held_out=held_out)
    assert exact.share(held_out) == 1
