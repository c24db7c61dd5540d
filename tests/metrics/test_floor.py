from collections import Counter

import pytest

from lit_diffusion.metrics.floor import draw, in_words, shuffled

LABELS = [0] * 50 + [1] * 20 + [2] * 5


@pytest.mark.parametrize("number", range(3))
def test_a_draw_has_the_wanted_labels_and_no_image_twice(number):
    chosen = draw(LABELS, {0: 5, 1: 5, 2: 5}, 15, number)
    assert len(set(chosen)) == 15
    assert Counter(LABELS[i] for i in chosen) == {0: 5, 1: 5, 2: 5}


def test_labels_that_are_too_few_are_all_taken_and_others_fill_the_draw():
    wanted = {0: 10, 1: 10, 2: 10}
    chosen = draw(LABELS, wanted, 30, 0)
    found = Counter(LABELS[i] for i in chosen)
    assert len(set(chosen)) == found.total() == 30
    assert found[2] == 5
    assert min(found[0], found[1]) >= 10


def test_without_labels_a_draw_is_random_and_always_the_same():
    chosen = draw(LABELS, {}, 20, 0)
    assert chosen == draw([-1] * 75, {}, 20, 0) == shuffled(75, 0)[:20]
    assert chosen != draw(LABELS, {}, 20, 1)


def test_what_was_drawn_is_told_in_words():
    assert in_words(20, "train", 20) == "20 train images with the samples' labels"
    assert in_words(20, "train", 0) == "20 train images, 0 with the samples' labels,"
    assert in_words(20, "train", None) == "20 train images"
