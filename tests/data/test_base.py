from collections import defaultdict

import pytest
import torch
from lightning.pytorch import LightningModule
from support.count_images import count_images
from support.pictures import class_folders
from support.plain_module import make_trainer
from support.spawn import spawn
from torch import nn

from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.photo_patches import PhotoPatches


class Pictures(ImageDataModule):
    """Ten numbered images without labels."""

    image_shape = (1, 2, 2)
    class_names = ()

    def load(self, split):
        number = torch.arange(10, dtype=torch.uint8)[:, None, None, None]
        images = number + torch.tensor([[0, 100], [0, 100]], dtype=torch.uint8)  # left is not right
        return TensorImages(images, torch.full((10,), -1), flip=True)


class Recorder(LightningModule):
    """Remembers the batches it gets, by stage."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches = defaultdict(list)

    def training_step(self, batch, batch_idx):
        self.batches["train"].append(batch)
        return self.weight**2

    def validation_step(self, batch, batch_idx):
        self.batches[self.trainer.state.stage.value].append(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def places(batches):
    return torch.cat([index for _, _, index in batches]).tolist()


def test_fit_shuffles_anew_every_epoch_and_validates_each_image_once():
    module, data = Recorder(), Digits(batch_size=200, seed=0)
    make_trainer(None, max_epochs=2, num_sanity_val_steps=0).fit(module, data)
    batches = module.batches["train"]
    assert {len(images) for images, _, _ in batches} == {200}
    epochs = places(batches[:7]), places(batches[7:])
    assert all(len(set(epoch)) == 1400 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])  # other images are left over
    assert places(module.batches["validate"]) == 2 * list(range(360))


@pytest.mark.parametrize(("data", "label"), [(Digits, lambda s: s % 10), (Pictures, lambda s: -1)])
def test_predict_yields_each_seed_once_with_its_label(data, label):
    module = Recorder()
    make_trainer(None).predict(module, data(batch_size=8, num_predict=21), return_predictions=False)
    seeds, labels = (torch.cat(part) for part in zip(*module.batches["predict"], strict=True))
    assert seeds.tolist() == list(range(21))
    assert labels.tolist() == [label(seed) for seed in range(21)]
    assert (seeds.dtype, labels.dtype) == (torch.int64, torch.int64)


class InParts(Pictures):
    """Which are conditioned on a number, where they have one."""

    def load(self, split):
        images = super().load(split).images
        return TensorImages(images, self.condition_of(torch.arange(10)))

    def condition_of(self, seeds):
        return seeds[:, None] / 10, seeds % 3 > 0


def make_digits(_, **kwargs):
    return Digits(batch_size=300, **kwargs)


def make_photo_patches(_, **kwargs):
    return PhotoPatches(epoch_size=40, batch_size=10, **kwargs)


def make_image_folder(folder, **kwargs):
    augmented = {"flip": True, "random_crop": True, "cache_dir": str(folder / "cache")}
    root = class_folders(folder / "pictures", each=6)
    return ImageFolder(str(root), val=2, image_size=16, batch_size=5, **augmented, **kwargs)


MAKERS = [make_digits, make_photo_patches, make_image_folder]


@pytest.mark.quick("make_image_folder")
@pytest.mark.parametrize("make", MAKERS)
def test_batches_do_not_depend_on_the_number_of_workers(make, tmp_path):
    alone, worked = (two_epochs(make(tmp_path, seed=3, num_workers=n)) for n in (0, 2))
    for a, w in zip(alone, worked, strict=True):
        assert all(torch.equal(*parts) for parts in zip(a, w, strict=True))


def two_epochs(data):
    loader = data.train_dataloader()
    batches = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        batches.extend(loader)
    return batches


@pytest.mark.parametrize("make", MAKERS)
def test_training_follows_the_seed_and_nothing_else_does(make, tmp_path):
    a, b = (make(tmp_path, seed=seed, num_workers=0) for seed in (1, 2))
    assert not torch.equal(next(iter(a.train_dataloader()))[0], next(iter(b.train_dataloader()))[0])
    for split in ("train", "val"):
        assert torch.equal(a.images(split), b.images(split))
        assert a.fingerprint(split) == b.fingerprint(split)
    assert a.fingerprint("train") != a.fingerprint("val")


def test_without_a_seed_the_run_decides(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert Digits().seed == 17
    assert Digits(seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert Digits().seed == 0


@pytest.mark.system
def test_several_processes_count_every_image_once(tmp_path):
    """In validation 65 and 64 images would be 2 batches and 1, and the processes miss."""
    ranks = spawn(count_images, 2, tmp_path)
    for stage, num in (("validate", 129), ("test", 129), ("predict", 64)):
        assert sorted(place for rank in ranks for place in rank[stage]) == list(range(num))
    for epoch in range(2):
        shares = [rank["train"][epoch] for rank in ranks]
        assert len({place for share in shares for place in share}) == sum(map(len, shares))
        assert {len(share) for share in shares} == {64}


def test_one_changed_pixel_or_number_of_a_condition_changes_the_fingerprint():
    images = Pictures().images("val").clone()
    images[3, 0, 1, 1] += 1
    pixels, parts = Pictures(), InParts()
    pixels.load = lambda split: TensorImages(images, torch.full((10,), -1))
    parts.condition_of = lambda seeds: (seeds[:, None] / 10, seeds % 4 > 0)
    for changed, kind in ((pixels, Pictures), (parts, InParts)):
        assert kind().fingerprint("val") == kind(batch_size=3).fingerprint("val")
        assert changed.fingerprint("val") != kind().fingerprint("val")


def test_the_split_that_is_tested_is_named(caplog):
    class Held(Digits):
        tests_on = "test"

        def load(self, split):
            return super().load("train" if split == "test" else split)

    for data, length in ((Held(), 1437), (Digits(), 360)):
        module = Recorder()
        caplog.clear()
        make_trainer(None).test(module, data, verbose=False)
        assert places(module.batches["test"]) == list(range(length))
        assert ("this is the validation split" in caplog.text) == (length == 360)
    with pytest.raises(ValueError, match="also for testing"):
        Digits().dataset("test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"batch_size": 10**30}, r"batch_size must be below 2\^63, got 10"),
        ({"num_workers": 10**6}, "num_workers must be at most 16 for each of the"),
        ({"batch_size": 2000}, r"batch_size 2000 on 1 process\(es\) is more than the 1437"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Digits(**arguments).train_dataloader()
