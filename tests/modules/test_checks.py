import math

import pytest
import torch

from lit_diffusion.codecs import PixelCodec
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.guidance import ClassifierScore
from lit_diffusion.modules.checks import (
    FiniteDenoise,
    check_batch,
    check_clipping,
    check_data,
    unused_classes,
)
from lit_diffusion.protocols import Denoised, NonFiniteSamples
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Heun


class Pictures:
    image_shape = (3, 8, 8)
    num_classes = None


class Halving:
    """A codec of half the size, whose x0 has no bounds."""

    bounded = False

    def encoded_shape(self, image_shape):
        channels, height, width = image_shape
        return 4 * channels, height // 2, width // 2


def test_data_of_another_shape_or_without_classes_are_refused_and_those_that_say_nothing_fit():
    for silent in (None, object()):
        check_data(silent, PixelCodec(), (1, 8, 8), 10)
    check_data(Pictures(), PixelCodec(), (3, 8, 8), None)
    check_data(Pictures(), Halving(), (12, 4, 4), None)
    with pytest.raises(ValueError, match=r"image_shape is \(1, 8, 8\) in the module, but"):
        check_data(Pictures(), PixelCodec(), (1, 8, 8), None)
    with pytest.raises(ValueError, match="num_classes is 10 in the module, but None in Pictures"):
        check_data(Pictures(), PixelCodec(), (3, 8, 8), 10)


@pytest.mark.parametrize(
    "clipping", [DDPM(FixedSmall()), DDIM(), DPMSolverPP(), Heun(), ClassifierScore(None)], ids=repr
)
def test_clamping_what_has_no_bounds_is_refused(clipping):
    check_clipping(PixelCodec(), clipping, None)
    check_clipping(Halving(), type(clipping)(**{**vars(clipping), "clip": False}), None)
    with pytest.raises(ValueError, match=r"clamps x0 .* that of Halving goes beyond; use clip=F"):
        check_clipping(Halving(), None, clipping)


class Pets:
    class_names = ("cats", "dogs")


def test_classes_that_a_model_is_not_told_are_said():
    message = unused_classes(Pets())
    assert message.startswith(
        "The data have 2 classes (cats, dogs), which this model does not use;"
    )
    assert "num_classes=2, in the module and in its network" in message
    assert unused_classes(Pictures()) is None
    assert unused_classes(None) is None


IMAGES, INDEX = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.arange(2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((IMAGES, INDEX), r"\(uint8 \(2, 1, 4, 4\), int64 \(2,\)\)"),
        (IMAGES, r"\(uint8 \(2, 1, 4, 4\)\)"),
        ({"image": IMAGES}, r"\(dict\)"),
        (None, r"\(NoneType\)"),
    ],
)
def test_a_batch_of_other_parts_is_refused_by_what_it_holds(batch, message):
    with pytest.raises(ValueError, match=rf"index \(B,\) of each .* got {message}; write"):
        check_batch(batch, takes_condition=True)


@pytest.mark.parametrize("index", [("a.png", "b.png"), torch.zeros(2), torch.zeros(2, 1).long()])
def test_an_index_that_is_none_is_refused(index):
    with pytest.raises(ValueError, match=r"the third part of a batch must be the index \(B,\)"):
        check_batch((IMAGES, INDEX, index), takes_condition=True)


@pytest.mark.parametrize("condition", [torch.zeros(2, 8), torch.zeros(2), ("a", "b"), [INDEX]])
def test_a_condition_that_would_go_unused_is_refused(condition):
    check_batch((IMAGES, condition, INDEX), takes_condition=True)
    with pytest.raises(ValueError, match="this module takes none: pass conditioning="):
        check_batch((IMAGES, condition, INDEX), takes_condition=False)
    check_batch((IMAGES, INDEX.int(), INDEX), takes_condition=False)


def finite_denoise(values):
    """A FiniteDenoise that was called at t = 9, 8, ... with one row of values a step."""
    steps = iter(values)
    denoise = FiniteDenoise(lambda x, t: Denoised(x + torch.tensor(next(steps)).view(-1, 1), x))
    for i in range(len(values)):
        denoise(torch.zeros(2, 1), torch.full((2,), 9.0 - i))
    return denoise


def test_a_sample_is_named_with_the_time_at_which_it_went_wrong():
    denoise = finite_denoise([[0.0, 1.0], [0.0, math.inf], [math.nan, 0.0]])
    with pytest.raises(NonFiniteSamples, match="after 40 optimizer steps, from t = 8 on") as error:
        denoise.raise_if_non_finite(torch.zeros(2, 1), [5, 6], 40)
    assert error.value.seeds == [5, 6]


def test_of_finite_steps_a_result_that_is_not_finite_counts_too():
    denoise = finite_denoise([[0.0, 1.0], [2.0, 3.0]])
    denoise.raise_if_non_finite(torch.zeros(2, 1), [5, 6], 0)
    with pytest.raises(NonFiniteSamples, match="from the last step on") as error:
        denoise.raise_if_non_finite(torch.tensor([[0.0], [math.nan]]), [5, 6], 1)
    assert error.value.seeds == [6]
