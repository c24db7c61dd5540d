import pytest
import torch

from lit_diffusion.modules.checks import check_data, check_device


class Pictures:
    image_shape = (3, 8, 8)
    num_classes = None


def test_data_that_say_nothing_fit():
    check_data(None, (1, 8, 8), 10)
    check_data(object(), (1, 8, 8), 10)


def test_data_of_another_shape_are_refused():
    check_data(Pictures(), (3, 8, 8), None)
    check_data(Pictures(), None, None)  # a codec changes the shape
    with pytest.raises(ValueError, match=r"image_shape is \(1, 8, 8\) in the module, but"):
        check_data(Pictures(), (1, 8, 8), None)


def test_classes_without_labelled_data_are_refused():
    with pytest.raises(ValueError, match="num_classes is 10 in the module, but None in Pictures"):
        check_data(Pictures(), None, 10)


def test_devices_without_float64_are_refused():
    check_device(torch.device("cuda"))
    with pytest.raises(ValueError, match=r"accelerator=cpu"):
        check_device(torch.device("mps"))
