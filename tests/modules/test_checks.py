import math

import pytest
import torch

from lit_diffusion.modules.checks import LossWatch, check_data


def test_the_first_loss_that_is_not_finite_is_remembered():
    watch, u = LossWatch(), torch.tensor([0.25, 0.5, 0.75])
    watch.see(torch.tensor([1.0, 2.0, 3.0]), u, 0)
    assert watch.first_bad() is None
    watch.see(torch.tensor([1.0, math.nan, math.inf]), u, 1)
    watch.see(torch.tensor([math.nan, 1.0, 1.0]), u, 2)
    assert watch.first_bad() == (1, 0.5)


def test_nothing_is_bad_before_the_first_loss():
    assert LossWatch().first_bad() is None


def test_data_that_say_nothing_fit():
    check_data(None, image_shape=(1, 8, 8), num_classes=None)

    class Wide:
        image_shape = (3, 8, 8)

    check_data(Wide(), image_shape=(3, 8, 8), num_classes=10)
    with pytest.raises(
        ValueError, match=r"image_shape is \(1, 8, 8\) in the module, but \(3, 8, 8\)"
    ):
        check_data(Wide(), image_shape=(1, 8, 8), num_classes=None)
