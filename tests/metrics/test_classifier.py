import pytest
import torch

from lit_diffusion.metrics.classifier import SmallClassifier


def network():
    torch.manual_seed(0)
    return SmallClassifier(channels=1, size=8, widths=(4, 6), num_classes=10).eval()


def test_features_of_an_image_do_not_depend_on_the_others():
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    together = network()(images)
    alone = torch.cat([network()(image[None]) for image in images])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)


def test_the_number_of_features_is_the_last_width():
    assert network()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (
        2,
        network().num_features,
    )


def test_floats_are_refused_for_their_range_is_unknown():
    with pytest.raises(TypeError, match="uint8"):
        network()(torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 8, 8)])
def test_images_of_another_shape_are_refused_with_both_shapes(shape):
    with pytest.raises(ValueError, match=r"\(1, 8, 8\), got"):
        network()(torch.zeros(2, *shape, dtype=torch.uint8))
