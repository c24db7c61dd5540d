import pytest
import torch
from support.pixels import PixelProtocol, random_images
from torch.utils.data import TensorDataset

from lit_diffusion.metrics import auxiliary_metrics
from lit_diffusion.metrics.auxiliary_metrics import (
    DISTANCES,
    FRACTIONS,
    FeatureComparison,
    build_auxiliary_metrics,
)
from lit_diffusion.metrics.extractors import Pixels
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.metrics.reference import Scorer, measure_reference

TRAIN, VAL = random_images(300, 0, size=8), random_images(200, 1, size=8)


def with_classes(name, images):
    return ImageSet(name, TensorDataset(images, torch.arange(len(images)) % 3))


def build(folder, real="train", others=True, num=300, train=TRAIN, val=VAL, labels=None):
    protocol = PixelProtocol([])
    scorer = Scorer(protocol, protocol.build(), torch.device("cpu"), batch_size=64)
    other = ("val", val) if real == "train" else ("train", train)
    settings = (
        with_classes(real, val if real == "val" else train),
        with_classes(*other) if others else None,
        *(num, folder, labels),
    )
    fid = FeatureComparison("", scorer, measure_reference(scorer, *settings))
    return build_auxiliary_metrics(fid, *settings)


def score(metrics, images, batch=64):
    """The FID, and the other metrics by name."""
    samples = metrics.accumulator()
    for part in images.split(batch):
        assert samples.add(part).isfinite().all()
    return samples.compute()


def distance(fake, real):
    metric = FrechetDistance(fake.shape[1])
    metric.update(fake, real=False)
    metric.update(real, real=True)
    return metric.compute().item()


def test_training_images_as_samples_are_at_no_distance_and_memorized(tmp_path):
    fid, values = score(build(tmp_path), TRAIN)
    assert fid < 1e-6
    assert set(values) == {*DISTANCES, *(f"{name} floor" for name in DISTANCES), *FRACTIONS}
    assert values["pixels"] < 1e-6
    assert values["random-cnn"] < 1e-6
    held_out = distance(TRAIN.flatten(1)[:, :4], VAL.flatten(1)[:, :4])
    assert values["held-out"] == pytest.approx(held_out)
    assert [values[name] for name in FRACTIONS] == [1.0] * 5


def test_half_of_new_images_are_as_near_to_training_images_as_held_out_ones(tmp_path):
    metrics = build(tmp_path)
    assert 0.35 < score(metrics, random_images(300, 2, size=8))[1]["memorized"] < 0.65
    assert score(metrics, VAL)[1]["memorized"] == 0.5  # at the median or nearer
    assert score(metrics, 0 * VAL)[1]["memorized"] == 0


def test_pixels_show_what_the_extractor_overlooks(tmp_path):
    """The extractor gives the first four pixels alone, of which nothing is changed."""
    changed = TRAIN.clone()
    changed[:, :, 4:] = 128
    fid, values = score(build(tmp_path), changed)
    assert fid < 1e-6
    assert values["precision"] == values["recall"] == 1
    grid = Pixels(1).build()
    assert values["pixels"] == pytest.approx(distance(grid(changed), grid(TRAIN)))
    assert values["pixels"] > 2 * values["pixels floor"]
    assert values["pixel recall"] < 0.9


def test_features_of_real_images_are_extracted_once(tmp_path):
    first, again = build(tmp_path), build(tmp_path)
    counts = [metrics.comparisons[0].scorer.extractor.num_images for metrics in (first, again)]
    assert counts[1] == 0 < counts[0]
    images = random_images(100, 4, size=8)
    assert score(first, images) == score(again, images)
    changed = random_images(300, 5, size=8)
    assert score(build(tmp_path, train=changed), changed)[1]["memorized"] == 1


def test_a_large_set_is_represented_by_evenly_spaced_images(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary_metrics, "MAX_REAL", 60)
    monkeypatch.setattr(auxiliary_metrics, "MAX_NEIGHBORS", 30)
    metrics = build(tmp_path)
    pixels = {each.name: each for each in metrics.comparisons}["pixels"]
    assert pixels.reference.num_images == 60
    assert torch.equal(pixels.real_features, Pixels(1).build()(TRAIN[::10]))
    assert len(metrics.memorization[0]) == 60
    samples = torch.cat([TRAIN[::10], 255 - TRAIN])[torch.randperm(330)][:300]
    others = samples.clone()
    others[torch.arange(300) % 10 > 0] = 0
    _, first = score(metrics, samples)
    _, changed = score(metrics, others, batch=7)
    assert changed["pixels"] != first["pixels"]
    assert [changed[name] for name in FRACTIONS] == [first[name] for name in FRACTIONS]
    others[::10] = 0
    assert score(metrics, others)[1]["pixel recall"] != first["pixel recall"]
