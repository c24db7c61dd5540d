import pytest
import torch

from lit_diffusion.conditioning import ClassLabels, condition_for

LABELS = ClassLabels(4)


def test_dropped_labels_are_minus_one_and_the_others_stay():
    labels, drop = torch.arange(4), torch.tensor([True, False, True, False])
    assert LABELS.dropped(labels, drop).tolist() == [-1, 1, -1, 3]
    assert labels.tolist() == [0, 1, 2, 3]
    assert LABELS.null(labels).tolist() == [-1] * 4
    assert LABELS.null(labels).dtype == LABELS.dropped(labels, drop).dtype == torch.int64


def test_classes_of_samples_are_the_seeds_modulo_their_number():
    assert LABELS.for_seeds(range(6)).tolist() == [0, 1, 2, 3, 0, 1]
    assert condition_for([5, 2], None, LABELS).tolist() == [1, 2]


def test_labels_of_the_user_win():
    given = torch.tensor([3, -1])
    assert condition_for([0, 1], given, LABELS) is given


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([4, 1]), r"labels must be 0..3 or -1, got \[1, 4\]"),
        (torch.tensor([-2, 1]), r"labels must be 0..3 or -1, got \[-2, 1\]"),
        (torch.tensor([1]), r"one per image, \(2,\), got \(1,\) of torch.int64"),
        (
            torch.tensor([1.0, 2.0]),
            r"one per image, \(2,\), got \(2,\) of torch.float32; use int64",
        ),
        ((torch.ones(2, 3), torch.ones(2)), r"one tensor \(2,\), got tuple"),
    ],
)
def test_what_is_no_label_is_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        condition_for([0, 1], labels, LABELS)


def test_a_model_without_labels_takes_none_for_an_answer():
    assert condition_for([0, 1], None, None) is None
    assert condition_for([0, 1], torch.tensor([-1, -1]), None) is None
    with pytest.raises(ValueError, match=r"labels must be -1, without num_classes, got \[0, 3\]"):
        condition_for([0, 1], torch.tensor([0, 3]), None)
    with pytest.raises(ValueError, match="at least one seed"):
        condition_for([], None, LABELS)
