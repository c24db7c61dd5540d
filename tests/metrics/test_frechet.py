import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

from lit_diffusion.metrics.frechet import FrechetDistance


def normal(count, features, seed, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, features, generator=generator, dtype=torch.float64) + shift


def distance(fake, real, batch=50):
    metric = FrechetDistance(fake.shape[1])
    for rows in fake.split(batch):
        metric.update(rows, real=False)
    for rows in real.split(batch):
        metric.update(rows, real=True)
    return metric.compute().item()


def by_torch_fidelity(fake, real):
    statistics = [fid_features_to_statistics(features) for features in (fake, real)]
    return fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]


@pytest.mark.parametrize("count", [400, 12], ids=["many", "fewer than features"])
def test_it_equals_torch_fidelity_on_the_same_features(count):
    mix = normal(16, 16, 2)
    fake, real = normal(count, 16, 0) @ mix, normal(count, 16, 1, scale=1.3, shift=0.2) @ mix
    assert distance(fake, real) == pytest.approx(by_torch_fidelity(fake, real), rel=1e-6)


def test_equal_sets_have_distance_zero_and_never_less():
    for seed in range(10):
        features = normal(100, 8, seed)
        assert 0 <= distance(features, features.flip(0)) < 1e-9


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["fake", "real"])
def test_one_feature_that_is_not_finite_gives_nan_and_the_process_lives(value, which):
    sets = {"fake": normal(100, 8, 0), "real": normal(100, 8, 1)}
    sets[which][3, 5] = value
    assert np.isnan(distance(sets["fake"], sets["real"]))


def test_float32_features_are_summed_in_float64():
    fake = normal(5000, 4, 0, shift=1000.0).float()
    real = normal(5000, 4, 1, shift=1000.0).float()
    assert distance(fake, real) == pytest.approx(
        by_torch_fidelity(fake.double(), real.double()), rel=1e-3
    )
