import math
import random

import pytest

from lit_diffusion.lab.compare.stability import Stability, stability


def falling(n, seed=0, scatter=0.15):
    """A loss that falls from 1 to 0.1, with the scatter of single batches."""
    noise = random.Random(seed)
    return [(0.1 + 0.9 * math.exp(-k / 100)) * math.exp(noise.gauss(0, scatter)) for k in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_with_scatter_is_stable(seed):
    assert stability(falling(1500, seed)).stable


def test_each_jump_counts_once_however_long_it_lasts():
    losses = falling(600)
    for start, length in ((200, 1), (300, 15), (400, 40)):
        losses[start : start + length] = [5.0] * length
    assert stability(losses) == Stability(spikes=3, diverged=False)


def test_a_jump_right_after_the_start_counts():
    losses = falling(600)
    losses[3:15] = [50.0] * 12
    assert stability(losses) == Stability(spikes=1, diverged=False)


def test_a_loss_that_never_comes_back_diverged():
    assert stability(falling(300) + [1.0] * 50) == Stability(spikes=1, diverged=True)


@pytest.mark.parametrize("at", [1, 10, 30])
def test_a_loss_that_ends_above_where_it_began_diverged(at):
    """However early it blew up: no calm step came before."""
    assert stability([1.0] * at + [50.0] * 200).diverged


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_diverged(bad):
    assert stability([*falling(300), bad, 0.1]).diverged


def test_units_do_not_matter():
    losses = [*falling(300), 1.0, *falling(300, 1)[200:]]
    assert stability(losses) == stability([1000 * loss for loss in losses])


def test_a_long_jump_does_not_become_the_new_normal():
    """The window holds calm losses only, or a run that stays high would seem to have recovered."""
    assert stability([1.0] * 20 + [3.0] * 500).diverged
