from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.pixels import FEATURES, PixelProtocol, random_images
from torch.utils.data import TensorDataset

from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.metrics.reference import (
    NUM_DRAWS,
    Scorer,
    draw_by_labels,
    load_statistics,
    measure_reference,
    shuffled_range,
)

LABELS = [0] * 50 + [1] * 20 + [2] * 5


def random_set(count, seed, name="val"):
    return ImageSet(name, TensorDataset(random_images(count, seed)))


def pixel_scorer():
    protocol = PixelProtocol([])
    return Scorer(protocol, protocol.build(), torch.device("cpu"), batch_size=7)


def distance(fake, real):
    metric = FrechetDistance(FEATURES)
    metric.update(fake.flatten(1), real=False)
    metric.update(real.flatten(1), real=True)
    return metric.compute().item()


def test_sums_are_those_of_all_images_which_are_read_once(tmp_path):
    first, second = pixel_scorer(), pixel_scorer()
    args = (random_set(30, 0), random_set(40, 1, "train"), 30, tmp_path)
    before, after = measure_reference(first, *args), measure_reference(second, *args)
    pixels = args[0].dataset.tensors[0].flatten(1).double()
    assert before.num_images == 30
    assert torch.equal(before.sums["real_features_sum"], pixels.sum(0))
    assert torch.equal(before.sums["real_features_cov_sum"], pixels.T @ pixels)
    assert (first.extractor.num_images, second.extractor.num_images) == (70, 0)
    assert (after.floors, after.floor_images) == (before.floors, before.floor_images)
    assert all(torch.equal(after.sums[name], before.sums[name]) for name in before.sums)


def test_other_images_other_numbers_and_other_weights_are_measured_anew(tmp_path):
    class Other(PixelProtocol):
        sha256 = "1" * 64

    train, scorer = random_set(40, 1, "train"), pixel_scorer()
    other = Scorer(Other([]), scorer.extractor, scorer.device, 7)
    variants = [
        (scorer, random_set(30, 0), train, 30),
        (scorer, random_set(30, 2), train, 30),
        (scorer, random_set(30, 0), random_set(40, 3, "train"), 30),
        (scorer, random_set(30, 0), None, 30),
        (scorer, random_set(30, 0), train, 20),
        (other, random_set(30, 0), train, 30),
    ]
    for variant in variants:
        measure_reference(*variant, tmp_path)
    for labels in ([k % 3 for k in range(30)], [k % 2 for k in range(30)]):
        measure_reference(*variants[0], tmp_path, labels)
    assert len(list(tmp_path.iterdir())) == len(variants) + 2


def test_other_labels_of_the_same_images_are_measured_anew(tmp_path):
    real, images = random_set(30, 0), random_images(60, 1)
    images[:30] //= 2

    def floor(classes, cache):
        others = ImageSet("train", TensorDataset(images, torch.tensor(classes)))
        return measure_reference(pixel_scorer(), real, others, 20, cache, [0] * 20).floor

    dark, bright = [0] * 30 + [1] * 30, [1] * 30 + [0] * 30
    first = floor(dark, tmp_path)
    assert floor(bright, tmp_path) == floor(bright, tmp_path / "other") != first
    assert floor(dark, tmp_path) == first


def test_a_broken_cache_file_is_named_not_used(tmp_path):
    args = (pixel_scorer(), random_set(30, 0), None, 30, tmp_path)
    measure_reference(*args)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=path.name):
        measure_reference(*args)
    np.savez(path, real_sum=np.array([Path.cwd()], dtype=object))  # read by unpickling alone
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        load_statistics(path)
    assert load_statistics(tmp_path / "missing.npz") is None


def test_the_floor_is_the_fid_of_training_images_in_place_of_samples(tmp_path):
    real, train = random_set(30, 0), random_set(25, 1, "train")
    reference = measure_reference(pixel_scorer(), real, train, 30, tmp_path)
    images = train.dataset.tensors[0]
    expected = distance(images, real.dataset.tensors[0])
    assert reference.floor == pytest.approx(expected, rel=1e-9)
    assert reference.floor_sd is None
    assert reference.floor_images == "25 train images against val"
    pool = images[shuffled_range(25, -1)[:20]]
    draws = [pool[shuffled_range(20, number)[:5]] for number in range(NUM_DRAWS)]
    expected = [distance(draw, real.dataset.tensors[0]) for draw in draws]
    few = measure_reference(pixel_scorer(), real, train, 5, tmp_path)
    assert few.floors == pytest.approx(expected)


def test_the_floor_is_the_mean_over_draws_of_images_with_the_samples_labels(tmp_path):
    """Class 0 is dark and class 1 bright, so the floor depends on their balance."""
    halves = random_images(400, 0) // 2, random_images(400, 1) // 2 + 128
    real = ImageSet("val", TensorDataset(torch.cat(halves)))
    labels = torch.tensor([0] * 300 + [1] * 100)
    images = torch.cat([halves[0][:300], halves[1][:100]])
    others = ImageSet("train", TensorDataset(images, labels))
    like_samples = [seed % 2 for seed in range(100)]
    balanced, as_they_come = (
        measure_reference(pixel_scorer(), real, others, 100, tmp_path, wanted)
        for wanted in (like_samples, None)
    )
    assert balanced.floor_images == "100 train images with the samples' labels against val"
    assert as_they_come.floor_images == "100 train images against val"
    assert len(set(balanced.floors)) == len(balanced.floors) == NUM_DRAWS
    assert balanced.floor == pytest.approx(sum(balanced.floors) / NUM_DRAWS)
    assert balanced.floor_sd == pytest.approx(torch.tensor(balanced.floors).std().item(), rel=1e-4)
    assert max(balanced.floors) < min(as_they_come.floors)


def test_without_other_images_one_half_is_compared_with_the_other(tmp_path):
    reference = measure_reference(pixel_scorer(), random_set(400, 0), None, 10_000, tmp_path)
    assert reference.floor_images == "200 val images against 200 others of them"
    assert reference.floor > reference.floor_sd > 0
    assert reference.num_images == 400


def test_too_few_images_and_features_that_are_not_finite_are_refused(tmp_path):
    scorer = pixel_scorer()
    with pytest.raises(ValueError, match="got 3 of val"):
        measure_reference(scorer, random_set(3, 0), None, 10, tmp_path)
    scorer.extractor.forward = lambda images: torch.full((len(images), FEATURES), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        measure_reference(scorer, random_set(30, 0), None, 10, tmp_path)


def test_a_draw_has_the_wanted_labels_as_far_as_there_are_enough():
    number = 1
    drawn = draw_by_labels(LABELS, {0: 5, 1: 5, 2: 5}, 15, number)
    assert len(set(drawn)) == 15
    assert Counter(LABELS[i] for i in drawn) == {0: 5, 1: 5, 2: 5}
    drawn = draw_by_labels(LABELS, {0: 10, 1: 10, 2: 10}, 30, number)
    counts = Counter(LABELS[i] for i in drawn)
    assert len(set(drawn)) == 30
    assert counts[2] == 5
    assert min(counts[0], counts[1]) >= 10
    drawn = draw_by_labels(LABELS, {}, 20, number)
    assert drawn == draw_by_labels([-1] * 75, {}, 20, number) == shuffled_range(75, number)[:20]
    assert drawn != draw_by_labels(LABELS, {}, 20, number + 1)


def test_features_are_float32_under_autocast():
    protocol = PixelProtocol([])
    scorer = Scorer(protocol, torch.nn.Flatten(), torch.device("cpu"), 4)
    is_enabled = []
    scorer.extractor.register_forward_hook(
        lambda module, args, out: is_enabled.append(torch.is_autocast_enabled("cpu"))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scorer.features(random_images(4, 0))
    assert is_enabled == [False]
