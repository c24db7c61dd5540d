import numpy as np
import pytest
import torch
from torch import nn

from lit_diffusion.lab.analysis.fixed_losses import copy_weights
from lit_diffusion.lab.analysis.landscape import (
    normalize_filters,
    principal_plane,
    project,
    random_directions,
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def test_filters_have_the_lengths_of_the_weights_and_biases_and_norms_do_not_move():
    net = network()
    direction = normalize_filters(random_directions(net, seed=5)[0], net)
    weights = dict(net.named_parameters())
    for name in ("0.weight", "3.weight"):
        lengths = [each[name].flatten(1).norm(dim=1) for each in (direction, weights)]
        torch.testing.assert_close(*lengths)
    assert all(direction[name].abs().max() == 0 for name in ("0.bias", "1.weight", "1.bias"))
    columns = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    direction = normalize_filters(random_directions(columns, seed=5)[0], columns)
    both = direction["0.weight"], columns[0].weight
    torch.testing.assert_close(*(each.square().sum((0, 2, 3)) for each in both))


def test_directions_are_a_function_of_the_seed_and_shared_by_networks_of_one_shape():
    first, second = (random_directions(network(), seed=5) for _ in range(2))
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert not torch.equal(first[0]["0.weight"], first[1]["0.weight"])


def test_the_principal_plane_of_a_path_in_a_plane_is_that_plane():
    net = network()
    center = copy_weights(net)
    first, second = random_directions(net, seed=3)
    names = list(first)
    coordinates = np.array([[3.0, 0.5], [1.0, 1.0], [-2.0, 0.25]])
    states = [{n: center[n] + u * first[n] + v * second[n] for n in names} for u, v in coordinates]
    np.testing.assert_allclose(project(states, center, [first, second]), coordinates, atol=1e-5)
    plane, share = principal_plane(states, center, names)
    assert share == pytest.approx(1, abs=1e-9)
    for state, (u, v) in zip(states, project(states, center, plane), strict=True):
        for n in names:
            point = center[n] + float(u) * plane[0][n] + float(v) * plane[1][n]
            torch.testing.assert_close(point, state[n], atol=1e-4, rtol=0)
    off = [*states, {n: center[n] + d for n, d in random_directions(net, seed=9)[0].items()}]
    assert principal_plane(off, center, names)[1] < 0.99
