import pytest
import torch
from torch.testing import assert_close

from lit_diffusion.data.described import (
    DESCRIPTIONS,
    DescribedDigits,
    DigitWords,
    described,
    measured,
    terciles,
)
from lit_diffusion.data.digits import Digits


def test_ink_and_slant_are_those_of_a_line_drawn_by_hand():
    line = torch.zeros(3, 1, 6, 6, dtype=torch.uint8)
    for row in range(6):
        line[0, 0, row, 2] = 255  # upright
        line[1, 0, row, 5 - row] = 255  # up and to the right
        line[2, 0, row, row // 2] = 51  # down and to the right, two rows a pixel
    ink, slant = measured(line)
    assert_close(ink, torch.tensor([1 / 6, 1 / 6, 0.2 / 6]).double(), check_dtype=False)
    assert_close(slant, torch.tensor([0, 1, -16 / 35]).double(), rtol=1e-6, atol=1e-6)


def test_slant_knows_no_place_and_no_brightness_and_turns_in_a_mirror():
    images = Digits().images("val")[:50]
    ink, slant = measured(images)
    moved = torch.nn.functional.pad(images // 2 * 2, (3, 1, 0, 5))
    assert_close(measured(moved)[1], measured(images // 2 * 2)[1], rtol=1e-9, atol=1e-9)
    assert_close(measured(images // 2 * 2 // 2)[1], measured(images // 2 * 2)[1])
    assert_close(measured(images.flip(-1)), (ink, -slant), rtol=1e-9, atol=1e-9)


def test_an_image_without_ink_has_no_slant():
    assert measured(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)) == (0, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_each_third_of_the_training_digits_has_a_word(which):
    digits = Digits().dataset("train")
    number = described(digits.images, digits.labels)
    assert torch.equal(number // 9, digits.labels)
    word = number % 9 // 3 if which == 0 else number % 3
    assert word.bincount().tolist() == pytest.approx([479] * 3, abs=3)  # some have the same ink
    values = measured(digits.images)[which]
    assert values[word == 0].max() <= terciles()[which][0] < values[word == 1].min()
    assert values[word == 1].max() <= terciles()[which][1] < values[word == 2].min()


def test_descriptions_are_numbered_by_class_then_ink_then_slant():
    assert len(set(DESCRIPTIONS)) == 90
    assert DESCRIPTIONS[9 * 7 + 3 * 2 + 2] == "thick seven leaning right"
    assert DESCRIPTIONS[9 * 1 + 3 * 0 + 1] == "thin one upright"


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_are_those_of_the_digits_each_with_its_description(split):
    ours, digits = DescribedDigits().dataset(split), Digits().dataset(split)
    assert torch.equal(ours.images, digits.images)
    numbers = described(digits.images, digits.labels)
    encode = DigitWords().encode
    expected = torch.stack([encode(DESCRIPTIONS[number]) for number in numbers])
    assert torch.equal(ours.labels, expected)
    _, words, _ = next(iter(DescribedDigits(batch_size=7).in_order(split)))
    DigitWords().check(words, 7)
    assert torch.equal(words, expected[:7])


def test_images_are_predicted_of_the_descriptions_in_turn():
    seeds, words = next(iter(DescribedDigits(num_predict=92).predict_dataloader()))
    assert torch.equal(words, DigitWords().for_seeds(seeds.tolist()))
    assert torch.equal(words[91], DigitWords().encode(DESCRIPTIONS[1]))
    assert DescribedDigits().num_classes is None
