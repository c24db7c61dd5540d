from dataclasses import dataclass, replace

import pytest
import torch
from support.pictures import picture

from lit_diffusion.data.pictures import CroppedPictures

INDEX = list(range(6))


@dataclass(frozen=True, eq=False)
class Drawn(CroppedPictures):
    """Six pictures, of which number i has label i."""

    image_size: int = 16
    mode: str = "RGB"
    flip: bool = False
    random_crop: bool = False

    def __len__(self):
        return len(INDEX)

    def read(self, index):
        return (picture(i) for i in index), torch.tensor(index)


def views(epoch, **options):
    """All six as they look in an epoch."""
    images, labels, index = Drawn(**options).fetch([epoch] * 6, INDEX)
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == index.tolist() == INDEX
    return images


def test_flips_mirror_the_crop_in_training_only():
    plain = views(0)
    assert torch.equal(views(0, flip=True, random_crop=True), plain)
    mirrored = 0
    for epoch in range(4):
        images = views(epoch, flip=True, seed=0)
        changed = (images != plain).flatten(1).any(1)
        assert torch.equal(images[changed], plain[changed].flip(-1))
        mirrored += changed.sum().item()
    assert 0 < mirrored < 24


@pytest.mark.parametrize("flip", [False, True])
def test_random_crops_differ_from_epoch_to_epoch_and_not_from_run_to_run(flip):
    options = {"random_crop": True, "flip": flip, "seed": 0}
    assert torch.equal(views(1, **options), views(1, **options))
    assert (views(1, **options) != views(2, **options)).flatten(1).any(1).all()
    assert (views(1, **options) != views(1, **options | {"seed": 1})).flatten(1).any(1).all()


def test_a_view_does_not_depend_on_the_other_pictures_of_its_batch():
    data = replace(Drawn(random_crop=True, flip=True), seed=3)
    together = data.fetch([2] * 6, INDEX)[0]
    assert torch.equal(data.fetch([2, 2], [4, 1])[0], together[[4, 1]])
