import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from lit_diffusion.data.digits import (
    DESCRIPTIONS,
    DescribedDigits,
    Digits,
    DigitWords,
    _terciles,
    is_held_out,
    measure_ink_and_slant,
    number_descriptions,
)


def test_all_1797_digits_are_there_once_with_their_labels():
    train, val = (Digits().dataset(split) for split in ("train", "val"))
    assert [len(train), len(val)] == [1437, 360]
    assert val.labels.bincount().tolist() == [36] * 10
    images = torch.cat([train.images, val.images]).flatten(1)
    ours = torch.cat([images, torch.cat([train.labels, val.labels])[:, None].byte()], 1)
    theirs = torch.from_numpy(load_digits().data).mul(255 / 16).round().to(torch.uint8)
    labels = torch.from_numpy(load_digits().target)[:, None].byte()
    assert unordered(ours) == unordered(torch.cat([theirs, labels], 1))


def unordered(rows):
    return sorted(map(bytes, rows.numpy()))


def test_held_out_digits_are_the_same_ones_for_ever():
    held_out = is_held_out(torch.from_numpy(load_digits().target)).nonzero().flatten().tolist()
    assert held_out[:8] == [7, 11, 20, 32, 34, 39, 41, 44]
    assert sum(held_out) == 329076


def test_two_halves_have_no_training_digit_in_common_and_the_same_held_out():
    whole, halves = Digits(), [Digits(part=(k, 2)) for k in (0, 1)]
    assert sum(len(half.dataset("train")) for half in halves) == 1437
    both = torch.cat([half.images("train").flatten(1) for half in halves])
    assert unordered(both) == unordered(whole.images("train").flatten(1))
    train, labels = whole.dataset("train"), halves[1].dataset("train").labels
    assert torch.equal(halves[1].images("train"), train.images[1::2])
    assert torch.equal(labels, train.labels[1::2])
    assert all(torch.equal(half.images("val"), whole.images("val")) for half in halves)
    for part in ((2, 2), (-1, 2), (0, 0), None):
        with pytest.raises(ValueError, match="0 <= k < n, and k below 1437, got"):
            Digits(part=part).images("train")


def test_ink_and_slant_are_those_of_a_line_drawn_by_hand():
    line = torch.zeros(4, 1, 6, 6, dtype=torch.uint8)  # the last stays empty
    for row in range(6):
        line[0, 0, row, 2] = 255  # upright
        line[1, 0, row, 5 - row] = 255  # up and to the right
        line[2, 0, row, row // 2] = 51  # down and to the right, two rows a pixel
    ink, slant = measure_ink_and_slant(line)
    assert_close(ink, torch.tensor([1 / 6, 1 / 6, 0.2 / 6, 0]).double(), check_dtype=False)
    assert_close(slant, torch.tensor([0, 1, -16 / 35, 0]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_each_third_of_the_training_digits_has_a_word(which):
    digits = Digits().dataset("train")
    number = number_descriptions(digits.images, digits.labels)
    assert torch.equal(number // 9, digits.labels)
    assert DESCRIPTIONS[9 * 7 + 3 * 2 + 2] == "thick seven leaning right"
    word = number % 9 // 3 if which == 0 else number % 3
    assert word.bincount().tolist() == pytest.approx([479] * 3, abs=3)  # some have the same ink
    values = measure_ink_and_slant(digits.images)[which]
    assert values[word == 0].max() <= _terciles()[which][0] < values[word == 1].min()
    assert values[word == 1].max() <= _terciles()[which][1] < values[word == 2].min()


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_are_those_of_the_digits_each_with_its_description(split):
    ours, digits = DescribedDigits().dataset(split), Digits().dataset(split)
    assert torch.equal(ours.images, digits.images)
    numbers = number_descriptions(digits.images, digits.labels)
    encode = DigitWords().encode
    expected = torch.stack([encode(DESCRIPTIONS[number]) for number in numbers])
    assert torch.equal(ours.labels, expected)
    _, words, _ = next(iter(DescribedDigits(batch_size=7).in_order(split)))
    DigitWords().check(words, 7)
    assert torch.equal(words, expected[:7])
