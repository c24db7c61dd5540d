from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_diffusion.lab.analysis.consistency import (
    check_same_images,
    measure_consistency,
)
from lit_diffusion.metrics.image_distances import MAX_PSNR

IMAGES = torch.randint(
    0, 256, (3, 12, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def by_hand(a, b):
    return 10 * np.log10(255**2 / ((a.double() - b.double()) ** 2).mean().item())


def test_the_paper_compares_with_the_first_and_all_pairs_with_all():
    result = measure_consistency(IMAGES, ["a", "b", "c"])
    mean = {
        (i, j): np.mean([by_hand(x, y) for x, y in zip(IMAGES[i], IMAGES[j], strict=True)])
        for i, j in ((0, 1), (0, 2), (1, 2))
    }
    assert result.paper == pytest.approx((mean[0, 1] + mean[0, 2]) / 2, rel=1e-6)
    assert result.all_pairs == pytest.approx(sum(mean.values()) / 3, rel=1e-6)
    assert result.pairs[2, 1] == result.pairs[1, 2] == pytest.approx(mean[1, 2], rel=1e-6)
    assert result.per_seed.mean() == pytest.approx(result.all_pairs)


def test_models_that_only_recall_have_the_same_nearest_images():
    bank = IMAGES[0]

    def nearest(images):
        return bank[torch.cdist(images.flatten(1).float(), bank.flatten(1).float()).argmin(1)]

    near = torch.stack([bank, (bank.int() ^ 2).to(torch.uint8)])
    result = measure_consistency(near, ["a", "b"], nearest)
    assert result.same_nearest == 1
    assert result.nearest == pytest.approx((MAX_PSNR + by_hand(bank, near[1])) / 2)
    assert measure_consistency(near.flip(1)[:, :6], ["a", "b"], lambda x: x).same_nearest == 0


def test_images_of_one_class_are_compared_with_each_other_alone():
    labels = torch.arange(12) % 5
    result = measure_consistency(IMAGES[:2], ["a", "b"], labels=labels)
    others = [(i, j) for i in range(12) for j in range(12) if i != j]
    chance = {(i, j): by_hand(IMAGES[1, i], IMAGES[0, j]) for i, j in others}
    by_class = [value for (i, j), value in chance.items() if labels[i] == labels[j]]
    assert result.same_class == pytest.approx(np.mean(by_class), rel=1e-6)
    assert result.shuffled == pytest.approx(np.mean([*chance.values()]), rel=1e-6)
    for no_two in (torch.arange(12), None):
        assert measure_consistency(IMAGES[:2], ["a", "b"], labels=no_two).same_class is None


def test_models_that_share_their_classes_alone_agree_by_chance():
    labels = torch.arange(200) % 10
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randint(0, 200, (10, 1, 8, 8), generator=generator)
    noise = torch.randint(0, 56, (2, 200, 1, 8, 8), generator=generator)
    images = (prototypes[labels] + noise).to(torch.uint8)
    features = lambda images: images.flatten(1).double()  # noqa: E731
    result = measure_consistency(images, ["a", "b"], features_of=features, labels=labels)
    assert result.all_pairs == pytest.approx(result.same_class, abs=0.1)
    assert result.features == pytest.approx(0, abs=0.02)


def test_models_that_make_one_image_only_have_no_similarity_of_features():
    features = lambda images: images.flatten(1).float()  # noqa: E731
    assert measure_consistency(IMAGES[:2] * 0, ["a", "b"], features_of=features).features is None


def test_models_that_make_other_images_are_refused():
    def model(name, shape, num_classes):
        generate = lambda seeds: torch.zeros(len(seeds), *shape)  # noqa: E731
        module = SimpleNamespace(generate=generate, num_classes=num_classes)
        return SimpleNamespace(path=name, module=module)

    ten, five = model("ten", (1, 8, 8), 10), model("five", (1, 8, 8), 5)
    no_classes, large = model("none", (1, 8, 8), None), model("large", (1, 16, 16), 10)
    assert check_same_images([ten, ten]) == 10
    assert check_same_images([ten, no_classes]) is None
    for other, rule in ((five, "five 1x8x8, 5"), (large, "large 1x16x16, 10")):
        with pytest.raises(ValueError, match=rule):
            check_same_images([ten, other])
    with pytest.raises(ValueError, match="classifier: SimpleNamespace cannot generate"):
        check_same_images([SimpleNamespace(path="classifier", module=SimpleNamespace())])
