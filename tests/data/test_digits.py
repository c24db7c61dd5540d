import pytest
import torch
from sklearn.datasets import load_digits

from lit_diffusion.data.digits import Digits, is_held_out


def test_all_1797_digits_are_there_once():
    data = Digits()
    splits = [data.images("train"), data.images("val")]
    assert [len(images) for images in splits] == [1437, 360]
    ours = torch.cat(splits).flatten(1)
    theirs = torch.from_numpy(load_digits().data).mul(255 / 16).round().to(torch.uint8)
    assert torch.equal(unordered(ours), unordered(theirs))


def unordered(rows):
    return torch.tensor(sorted(rows.tolist()))


def test_grey_levels_span_all_of_uint8_and_round_to_nearest():
    levels = Digits().images("train").unique().tolist()
    assert levels == [round(v * 255 / 16) for v in range(17)]
    assert (levels[0], levels[-1]) == (0, 255)


def test_36_of_each_class_are_held_out():
    _, labels, _ = next(iter(Digits(batch_size=360).val_dataloader()))
    assert labels.bincount().tolist() == [36] * 10


def test_held_out_digits_are_the_same_ones_for_ever():
    held_out = is_held_out(torch.from_numpy(load_digits().target)).nonzero().flatten().tolist()
    assert held_out[:8] == [7, 11, 20, 32, 34, 39, 41, 44]
    assert sum(held_out) == 329076


def test_labels_belong_to_their_digits():
    data = Digits()
    train, val = data.dataset("train"), data.dataset("val")
    distance = torch.cdist(val.images.flatten(1).double(), train.images.flatten(1).double())
    nearest = train.labels[distance.argmin(1)]
    assert (nearest == val.labels).double().mean() > 0.97  # 1-nearest-neighbour knows digits


def test_the_description_is_there_before_any_data_is_read():
    data = Digits()
    assert (data.image_shape, data.num_classes) == ((1, 8, 8), 10)
    assert data.class_names[7] == "7"


def test_two_halves_have_no_training_digit_in_common_and_the_same_held_out():
    whole, halves = Digits(), [Digits(part=(k, 2)) for k in (0, 1)]
    assert sum(len(half.dataset("train")) for half in halves) == 1437
    both = torch.cat([half.images("train").flatten(1) for half in halves])
    assert torch.equal(unordered(both), unordered(whole.images("train").flatten(1)))
    train, labels = whole.dataset("train"), halves[1].dataset("train").labels
    assert torch.equal(halves[1].images("train"), train.images[1::2])
    assert torch.equal(labels, train.labels[1::2])
    assert all(torch.equal(half.images("val"), whole.images("val")) for half in halves)
    for part in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="0 <= k < n, of 1437, got"):
            Digits(part=part).images("train")
