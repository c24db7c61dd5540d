import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from support.pictures import class_folders
from torch import nn

from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.photo_patches import PhotoPatches

SCRIPT = Path(__file__).parents[1] / "support" / "count_images.py"


class Pictures(ImageDataModule):
    """Ten numbered images without labels."""

    image_shape = (1, 2, 2)
    class_names = ()

    def load(self, split):
        number = torch.arange(10, dtype=torch.uint8)[:, None, None, None]
        images = number + torch.tensor([[0, 100], [0, 100]], dtype=torch.uint8)  # left is not right
        return TensorImages(images, torch.full((10,), -1), flip=True)


class Recorder(LightningModule):
    """Remembers the batches it gets."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch)
        return self.weight**2

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch)

    def test_step(self, batch, batch_idx):
        self.seen["test"].append(batch)

    def predict_step(self, batch, batch_idx):
        self.seen["predict"].append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**kwargs):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **kwargs)


def places(batches):
    return torch.cat([index for _, _, index in batches]).tolist()


def test_fit_shuffles_anew_every_epoch_and_validates_each_image_once():
    module = Recorder()
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(module, Digits(batch_size=200, seed=0))
    assert {len(images) for images, _, _ in module.seen["train"]} == {200}
    epochs = places(module.seen["train"][:7]), places(module.seen["train"][7:])
    assert all(len(set(epoch)) == 1400 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])  # other images are left over
    assert places(module.seen["val"]) == 2 * list(range(360))


@pytest.mark.parametrize(("data", "label"), [(Digits, lambda s: s % 10), (Pictures, lambda s: -1)])
def test_predict_yields_each_seed_once_with_its_label(data, label):
    module = Recorder()
    trainer().predict(module, data(batch_size=8, num_predict=21), return_predictions=False)
    seeds, labels = (torch.cat(part) for part in zip(*module.seen["predict"], strict=True))
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


def test_a_condition_may_have_parts():
    module, data = Recorder(), InParts(batch_size=4, num_predict=7)
    trainer(max_epochs=1).fit(module, data)
    for _, condition, index in module.seen["train"] + module.seen["val"]:
        expected = data.condition_of(index)
        assert isinstance(condition, tuple)
        assert all(torch.equal(*parts) for parts in zip(condition, expected, strict=True))
    trainer().predict(module, data, return_predictions=False)
    seeds, conditions = zip(*module.seen["predict"], strict=True)
    assert torch.cat(seeds).tolist() == list(range(7))
    values, there = (torch.cat(part) for part in zip(*conditions, strict=True))
    assert values.flatten().tolist() == pytest.approx([seed / 10 for seed in range(7)])
    assert there.tolist() == [seed % 3 > 0 for seed in range(7)]


def test_predict_needs_no_data(tmp_path):
    absent = ImageFolder(
        str(class_folders(tmp_path, each=1)), val=str(tmp_path / "no"), image_size=8
    )
    module = Recorder()
    trainer().predict(module, absent, return_predictions=False)
    assert module.seen["predict"]


def test_overfit_batches_repeats_the_same_pixels():
    module = Recorder()
    data = Pictures(batch_size=5, seed=0)
    trainer(max_epochs=3, overfit_batches=1).fit(module, data)
    first = module.seen["train"][0]
    assert len(module.seen["train"]) == 3
    assert all(torch.equal(images, first[0]) for images, _, _ in module.seen["train"])


def make_digits(_, **kwargs):
    return Digits(batch_size=300, **kwargs)


def make_photo_patches(_, **kwargs):
    return PhotoPatches(epoch_size=40, batch_size=10, **kwargs)


def make_image_folder(folder, **kwargs):
    augmented = {"flip": True, "random_crop": True, "cache_dir": str(folder / "cache")}
    root = class_folders(folder / "pictures", each=6)
    return ImageFolder(str(root), val=2, image_size=16, batch_size=5, **augmented, **kwargs)


MAKERS = [make_digits, make_photo_patches, make_image_folder]


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


@pytest.mark.parametrize("make", MAKERS)
def test_a_data_module_is_restored_from_plain_hyperparameters(make, tmp_path):
    data = make(tmp_path, seed=1)
    torch.save({"datamodule_hyper_parameters": dict(data.hparams)}, tmp_path / "hparams.pt")
    stored = torch.load(tmp_path / "hparams.pt", weights_only=True)["datamodule_hyper_parameters"]
    again = type(data)(**stored)
    assert again.fingerprint("val") == data.fingerprint("val")
    assert (again.batch_size, again.seed) == (data.batch_size, 1)


CONFIGS = {
    "digits.Digits": {"batch_size": 3, "num_predict": 9},
    "photo_patches.PhotoPatches": {"epoch_size": 7, "seed": 4},
    "cifar10.CIFAR10": {"root": "somewhere", "flip": True, "batch_size": 8},
    "image_folder.ImageFolder": {"train": "a", "val": 5, "image_size": 32, "channels": 1},
    "image_folder.ImageNet": {"root": "a", "image_size": 64, "random_crop": True, "num_workers": 1},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_builds_each_data_module(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    spec = {"class_path": f"lit_diffusion.data.{name}", "init_args": CONFIGS[name]}
    data = parser.instantiate(parser.parse_object({"data": spec})).data
    assert type(data).__name__ == name.split(".")[1]
    assert CONFIGS[name].items() <= data.hparams.items()
    spec["init_args"] = CONFIGS[name] | {"batch_sizes": 1}
    with pytest.raises(ArgumentError, match="batch_sizes"):
        parser.parse_object({"data": spec})


def test_without_a_seed_the_run_decides(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert Digits().seed == 17
    assert Digits(seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert Digits().seed == 0


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("data", "num_images"), [(Pictures, 10), (Digits, 360)])
def test_processes_see_each_image_once_in_any_epoch(data, num_images, num_replicas):
    loaders = [data(batch_size=7).in_order("val", num_replicas, r) for r in range(num_replicas)]
    for loader in loaders:
        loader.sampler.set_epoch(3)
    shares = [places(loader) for loader in loaders]
    assert [index for share in shares for index in share] == [
        *(index for r in range(num_replicas) for index in range(r, num_images, num_replicas))
    ]
    assert [len(share) for share in shares] == [len(loader.sampler) for loader in loaders]


@pytest.mark.system
@pytest.mark.parametrize(("num_images", "batch_size", "processes"), [(10, 4, 3), (129, 64, 2)])
def test_several_processes_count_every_image_once(num_images, batch_size, processes, tmp_path):
    """In the second case 65 and 64 images would be 2 batches and 1, and the processes miss."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    arguments = [str(tmp_path), str(num_images), str(batch_size)]
    subprocess.run([sys.executable, *launch, str(SCRIPT), *arguments], check=True, timeout=300)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]
    for stage in ("validate", "test"):
        assert sorted([place for rank in ranks for place in rank[stage]]) == list(range(num_images))
    for epoch in range(2):
        shares = [rank["train"][epoch] for rank in ranks]
        trained = [place for share in shares for place in share]
        assert len(set(trained)) == len(trained)
        assert {len(share) for share in shares} == {num_images // processes // 2 * 2}
    assert sorted([place for rank in ranks for place in rank["predict"]]) == list(range(64))


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
        trainer().test(module, data, verbose=False)
        assert places(module.seen["test"]) == list(range(length))
        told = "The data have no test split: this is the validation split." in caplog.messages
        assert told == (length == 360)
    with pytest.raises(ValueError, match="also for testing"):
        Digits().dataset("test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"num_workers": -1}, "num_workers must be >= 0, got -1"),
        ({"num_predict": 0}, "num_predict must be >= 1, got 0"),
        ({"num_workers": 10**6}, "num_workers must be at most 16 for each of the"),
        ({"batch_size": 2000}, r"batch_size 2000 on 1 process\(es\) is more than the 1437"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Digits(**arguments).train_dataloader()
