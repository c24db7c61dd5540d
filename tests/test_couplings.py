"""Couplings of noise and images: permutations of lowest cost, and the flow that they define."""

from itertools import permutations

import pytest
import torch

from lit_diffusion.couplings import BatchAssignment

COSTS = {"squared": lambda a, b: (a - b).square().sum(), "distance": lambda a, b: (a - b).norm()}


def batch(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, 1, 2, 2, generator=generator)


@pytest.mark.parametrize("cost", COSTS)
def test_no_permutation_of_the_noise_costs_less(cost):
    x0, noise = batch(5)

    def total(each):
        return sum(COSTS[cost](a, b) for a, b in zip(x0, each, strict=True))

    coupled = BatchAssignment(cost, within_classes=False).couple(x0, noise, None)
    lowest = min(total(noise[list(order)]) for order in permutations(range(5)))
    torch.testing.assert_close(total(coupled), lowest)


def test_the_two_costs_differ():
    """Of the pairs 0, 1 and 1, 3: crossing costs the same distance, but a larger square."""
    x0, noise = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.tensor([1.0, 2.6]).view(2, 1, 1, 1)
    x0 = torch.cat([x0, torch.ones_like(x0)], 1)  # off the line, where distances differ too
    noise = torch.cat([noise, torch.zeros_like(noise)], 1)
    by_square = BatchAssignment("squared", within_classes=False).couple(x0, noise, None)
    assert torch.equal(by_square, noise)


def test_noise_is_permuted_within_each_class_alone():
    x0, noise = batch(40)
    labels = torch.arange(40) % 3 - 1  # -1, no class, is a class of its own
    coupled = BatchAssignment().couple(x0, noise, labels)
    for label in (-1, 0, 1):
        given, expected = coupled[labels == label], noise[labels == label]
        assert not torch.equal(given, expected)
        assert sorted(given.flatten(1).tolist()) == sorted(expected.flatten(1).tolist())
        alone = BatchAssignment(within_classes=False).couple(x0[labels == label], expected, None)
        assert torch.equal(given, alone)


@pytest.mark.parametrize("condition", [torch.zeros(4, 8), (torch.zeros(4), torch.ones(4))])
def test_other_conditions_than_labels_need_the_whole_batch(condition):
    with pytest.raises(
        ValueError, match=r"one label per image, got .*float32 \(4.*; pass within_classes=False"
    ):
        BatchAssignment().couple(*batch(4), condition)
    assert BatchAssignment(within_classes=False).couple(*batch(4), condition).shape == (4, 1, 2, 2)


def test_without_labels_the_whole_batch_is_permuted():
    x0, noise = batch(20)
    whole = BatchAssignment(within_classes=False).couple(x0, noise, None)
    assert torch.equal(BatchAssignment().couple(x0, noise, None), whole)


def test_in_one_dimension_large_batches_give_the_monotone_map():
    """For x0 ~ N(m, s**2), optimal transport from N(0, 1) is x0 = m + s * noise."""
    mean, std = 2.0, 0.5
    x0 = mean + std * torch.randn(2000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2000, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    coupled = BatchAssignment(within_classes=False).couple(x0, noise, None)
    residual = x0 - (mean + std * coupled)
    independent = x0 - (mean + std * noise)
    assert residual.std() < 0.1 * independent.std()
    assert torch.equal(coupled.flatten().argsort(), x0.flatten().argsort())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("within_classes", [False, True])
def test_an_image_that_is_not_finite_is_left_to_the_loss(value, within_classes):
    """So that FiniteUpdates skips the update and names the image, as without a coupling."""
    x0, noise = batch(20)
    x0[3, 0, 0, 0] = value
    labels = torch.arange(20) % 2
    coupled = BatchAssignment(within_classes=within_classes).couple(x0, noise, labels)
    left = slice(1, None, 2) if within_classes else slice(None)
    assert torch.equal(coupled[left], noise[left])
    assert torch.equal(coupled[::2], noise[::2]) is not within_classes


def test_an_unknown_cost_is_named():
    with pytest.raises(ValueError, match="cost must be 'squared' or 'distance', got 'cosine'"):
        BatchAssignment("cosine")
