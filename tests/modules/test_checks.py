from types import SimpleNamespace

import pytest
import torch

from lit_diffusion.codecs import PixelCodec
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.guidance import ClassifierScore
from lit_diffusion.modules.checks import (
    check_batch,
    check_clipping,
    check_data,
)
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Heun

PICTURES = SimpleNamespace(image_shape=(3, 8, 8), num_classes=None)


class Halving:
    """A codec of half the size, whose x0 has no bounds."""

    bounded = False

    def encoded_shape(self, image_shape):
        channels, height, width = image_shape
        return 4 * channels, height // 2, width // 2


def test_data_of_another_shape_or_without_classes_are_refused_and_those_that_say_nothing_fit():
    for silent in (None, object()):
        check_data(silent, PixelCodec(), (1, 8, 8), 10)
    check_data(PICTURES, PixelCodec(), (3, 8, 8), None)
    check_data(PICTURES, Halving(), (12, 4, 4), None)
    with pytest.raises(ValueError, match=r"image_shape is \(1, 8, 8\) in the module, but"):
        check_data(PICTURES, PixelCodec(), (1, 8, 8), None)
    with pytest.raises(ValueError, match="num_classes is 10 in the module, but None in S"):
        check_data(PICTURES, PixelCodec(), (3, 8, 8), 10)


@pytest.mark.parametrize(
    "clipping", [DDPM(FixedSmall()), DDIM(), DPMSolverPP(), Heun(), ClassifierScore(None)], ids=repr
)
def test_clamping_what_has_no_bounds_is_refused(clipping):
    check_clipping(PixelCodec(), clipping, None)
    check_clipping(Halving(), type(clipping)(**{**vars(clipping), "clip": False}), None)
    with pytest.raises(ValueError, match=r"clamps x0 .* x0 of Halving can be .*; use clip=F"):
        check_clipping(Halving(), None, clipping)


IMAGES, INDEX = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.arange(2)
PARTS = r"index \(B,\) of each .* got "
THIRD = r"the third part of a batch must be the index \(B,\)"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((IMAGES, INDEX), rf"{PARTS}\(torch.uint8 \(2, 1, 4, 4\), torch.int64 \(2,\)\)"),
        (IMAGES, rf"{PARTS}\(torch.uint8 \(2, 1, 4, 4\)\)"),
        (None, rf"{PARTS}\(NoneType\)"),
        ((IMAGES, INDEX, ("a.png", "b.png")), THIRD),
        ((IMAGES, INDEX, torch.zeros(2, 1).long()), THIRD),
        ((IMAGES, torch.zeros(2, 8), INDEX), "this module takes none: pass conditioning="),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_what_it_holds(batch, message):
    with pytest.raises(ValueError, match=message):
        check_batch(batch, takes_condition=False)
    check_batch((IMAGES, INDEX.int(), INDEX), takes_condition=False)
    check_batch((IMAGES, torch.zeros(2, 8), INDEX), takes_condition=True)
