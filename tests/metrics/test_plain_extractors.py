import hashlib

import pytest
import torch
from support.pixels import random_images

from lit_diffusion.metrics.plain_extractors import GRID, Pixels, RandomCNN


@pytest.mark.parametrize("kind", [Pixels, RandomCNN])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 8, 28, 65])
def test_images_of_any_size_give_finite_features_and_say_how_many(kind, channels, size):
    extractor = kind(channels).build()
    features = extractor(random_images(5, 0, channels, size))
    assert features.shape == (5, extractor.num_features)
    assert features.isfinite().all()
    assert features.std(0).min() > 0 or kind is RandomCNN  # of which some units may be dead


def test_pixels_are_means_over_areas():
    images = random_images(4, 0, channels=2, size=4 * GRID)
    expected = images.double().view(4, 2, GRID, 4, GRID, 4).mean(dim=(3, 5)) / 127.5 - 1
    torch.testing.assert_close(
        Pixels(2).build()(images).double(), expected.flatten(1), atol=1e-6, rtol=0
    )


def test_an_untrained_network_is_the_same_wherever_it_is_built():
    images = random_images(8, 0, channels=3, size=32)
    torch.manual_seed(5)
    first = RandomCNN(3)
    state = torch.random.get_rng_state()
    features = first.build()(images)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(RandomCNN(3).build()(images), features)
    assert first.sha256 == RandomCNN(3).sha256 != RandomCNN(1).sha256
    assert first.sha256 != hashlib.sha256().hexdigest()


def test_pixels_of_other_channels_are_known_by_another_hash():
    assert Pixels(1).sha256 == Pixels(1).sha256 != Pixels(3).sha256


def test_an_untrained_network_sees_more_than_the_mean_of_an_image():
    images = random_images(64, 0, size=16)
    shuffled = images.flatten(1).gather(1, torch.rand(64, 256).argsort(1)).view_as(images)
    smooth = images.flatten(1).sort(dim=1).values.view_as(images)
    build = RandomCNN(1).build()
    own, same, other = (build(each).mean(0) for each in (images, shuffled, smooth))
    assert (own - other).norm() > 3 * (own - same).norm()


def test_an_untrained_network_sees_what_the_means_of_areas_hide():
    stripes = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    stripes[..., ::2] = 200
    flat = torch.full_like(stripes, 100)
    torch.testing.assert_close(*(Pixels(1).build()(each) for each in (stripes, flat)))
    own, other = (RandomCNN(1).build()(each) for each in (stripes, flat))
    assert (own - other).norm() > 0.1 * own.norm()
