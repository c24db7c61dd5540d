"""With samples of which it is known what a second look must find."""

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
from lit_diffusion.metrics.extractors import Pixels, RandomCNN
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.metrics.reference import Scorer, measure_reference

TRAIN, VAL = random_images(300, 0, size=8), random_images(200, 1, size=8)


def look(folder, reference="train", others=True, number=300, train=TRAIN, labels=None):
    protocol = PixelProtocol([])
    scorer = Scorer(protocol, protocol.build(), torch.device("cpu"), batch_size=64)
    images = {"train": train, "val": VAL, "elsewhere": train}[reference]
    classes = torch.arange(len(images)) % 3
    real = ImageSet(reference, TensorDataset(images, classes))
    other = ("val", VAL) if reference == "train" else ("train", train)
    other_classes = torch.arange(len(other[1])) % 3
    beside = ImageSet(other[0], TensorDataset(other[1], other_classes)) if others else None
    known = measure_reference(scorer, real, beside, number, folder, labels)
    return build_auxiliary_metrics(
        FeatureComparison("", scorer, known), real, beside, number, folder, labels
    )


def seen(look, images, batch=64):
    samples = look.accumulator()
    for part in images.split(batch):
        assert samples.add(part).isfinite().all()
    return samples.compute()


def distance(fake, real):
    metric = FrechetDistance(fake.shape[1])
    metric.update(fake, real=False)
    metric.update(real, real=True)
    return metric.compute().item()


def test_training_images_as_samples_are_found_out(tmp_path):
    fid, found = seen(look(tmp_path), TRAIN)
    assert fid < 1e-6
    assert set(found) == {*DISTANCES, *(f"{name} floor" for name in DISTANCES), *FRACTIONS}
    assert found["pixels"] < 1e-6
    assert found["random-cnn"] < 1e-6
    assert found["held-out"] == pytest.approx(
        distance(TRAIN.flatten(1)[:, :4], VAL.flatten(1)[:, :4])
    )
    shares = [found[name] for name in FRACTIONS]
    assert shares == [1.0] * 5  # memorized among them


def test_new_images_of_the_same_kind_are_no_copies(tmp_path):
    _, found = seen(look(tmp_path), random_images(300, 2, size=8))
    assert 0.35 < found["memorized"] < 0.65
    assert found["pixels"] > 0


def test_samples_that_repeat_one_image_have_precision_without_recall(tmp_path):
    _, found = seen(look(tmp_path), TRAIN[:1].repeat(100, 1, 1, 1))
    assert found["pixel precision"] == 1
    assert found["pixel recall"] < 0.05


def test_what_the_extractor_overlooks_is_seen_in_pixels(tmp_path):
    """The extractor sees the first four pixels alone, of which nothing is changed."""
    changed = TRAIN.clone()
    changed[:, :, 4:] = 128
    fid, found = seen(look(tmp_path), changed)
    assert fid < 1e-6
    assert found["precision"] == found["recall"] == 1
    grid = Pixels(1).build()
    assert found["pixels"] == pytest.approx(distance(grid(changed), grid(TRAIN)))
    assert found["pixels"] > 2 * found["pixels floor"]
    assert found["pixel recall"] < 0.9


def test_batches_change_nothing(tmp_path):
    images = random_images(130, 3, size=8)
    fids, looks = zip(*(seen(look(tmp_path), images, batch) for batch in (7, 130)), strict=True)
    assert fids[0] == pytest.approx(fids[1], rel=1e-9)
    assert looks[0] == pytest.approx(looks[1], rel=1e-9)


def test_only_training_images_have_a_held_out_fid_beside_them(tmp_path):
    assert "held-out" not in seen(look(tmp_path, "val"), TRAIN)[1]
    assert seen(look(tmp_path, "val"), TRAIN)[1]["memorized"] == 1
    found = seen(look(tmp_path, "elsewhere", others=False), TRAIN)[1]
    assert "held-out" not in found
    assert "memorized" not in found
    assert found["pixels"] < 1e-6


def test_features_of_real_images_are_extracted_once(tmp_path):
    first = look(tmp_path)
    used = first.comparisons[0].scorer.extractor.seen
    again = look(tmp_path)
    assert again.comparisons[0].scorer.extractor.seen == 0 < used
    images = random_images(100, 4, size=8)
    assert seen(first, images) == seen(again, images)


def test_of_a_large_set_so_many_are_looked_at_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary_metrics, "MAX_REAL", 60)
    monkeypatch.setattr(auxiliary_metrics, "MAX_NEIGHBORS", 30)
    found = look(tmp_path)
    pixels = {view.name: view for view in found.comparisons}["pixels"]
    assert pixels.reference.num_images == 60
    assert torch.equal(pixels.real_features, Pixels(1).build()(TRAIN[::10]))
    assert len(found.memorization.training) == 60
    samples = torch.cat([TRAIN[::10], 255 - TRAIN])[torch.randperm(330)][:300]
    others = samples.clone()
    others[torch.arange(300) % 10 > 0] = 0
    _, first = seen(found, samples)
    _, changed = seen(found, others, batch=7)
    assert changed["pixels"] != first["pixels"]
    assert [changed[name] for name in FRACTIONS] == [first[name] for name in FRACTIONS]
    others[::10] = 0
    assert seen(found, others)[1]["pixel recall"] != first["pixel recall"]


def test_changed_images_of_the_same_split_are_looked_at_anew(tmp_path):
    look(tmp_path)
    other = random_images(300, 5, size=8)
    _, found = seen(look(tmp_path, train=other), other)
    assert found["pixels"] < 1e-6
    assert [found[name] for name in FRACTIONS] == [1.0] * 5


def test_grey_images_are_looked_at_by_extractors_of_one_and_of_three_channels(tmp_path):
    """In one cache; grey as colour has every feature of the pixels three times."""
    real, others = (ImageSet(n, TensorDataset(x)) for n, x in (("train", TRAIN), ("val", VAL)))
    samples, pixels = random_images(100, 6, size=8), []
    for channels in (1, 3):
        protocol = RandomCNN(channels)
        scorer = Scorer(protocol, protocol.build(), torch.device("cpu"), batch_size=64)
        about = (real, others, 100, tmp_path, None)
        found = build_auxiliary_metrics(
            FeatureComparison("", scorer, measure_reference(scorer, *about)), *about
        )
        pixels.append(seen(found, samples)[1])
    for name in ("pixels", "pixels floor"):
        assert pixels[1][name] == pytest.approx(3 * pixels[0][name])
    for name in ("pixel precision", "pixel recall", "memorized"):
        assert pixels[1][name] == pytest.approx(pixels[0][name], abs=0.02)


def test_floors_are_of_images_with_the_labels_of_the_samples(tmp_path):
    mixed, same = (
        {
            view.name: view.reference.floor
            for view in look(tmp_path, number=60, labels=labels).comparisons
        }
        for labels in ([0, 1, 2] * 20, [1] * 60)
    )
    assert all(mixed[name] != same[name] for name in DISTANCES)


def test_too_few_held_out_images_have_no_distance(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "VAL", VAL[:3])
    assert "held-out" not in seen(look(tmp_path), TRAIN)[1]


def test_a_broken_file_of_features_is_named(tmp_path):
    look(tmp_path)
    path = next(tmp_path.glob("pixels-*-features-*.npy"))
    for left in (200, 0):
        path.write_bytes(path.read_bytes()[:left])
        with pytest.raises(ValueError, match=rf"{path.name} is not a file of features .*delete it"):
            look(tmp_path)


def test_samples_that_are_not_finite_leave_out_what_needs_all(tmp_path):
    found = look(tmp_path)
    samples, extractor = found.accumulator(), found.comparisons[0].scorer.extractor
    extractor.forward = lambda images: torch.full((len(images), 4), torch.nan)
    assert samples.add(TRAIN).isnan().all()
    fid, others = samples.compute()
    assert fid != fid
    assert not {"precision", "recall"} & others.keys()
    assert others["pixel recall"] == 1
