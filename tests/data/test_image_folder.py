import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from support.pictures import class_folders, picture, save, truncate

from lit_diffusion.data.cropped_images import center_crop
from lit_diffusion.data.image_folder import ImageFolder, ImageNet

WNIDS = ("n01440764", "n01443537")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path):
    return class_folders(tmp_path / "train")


@pytest.fixture
def val(tmp_path):
    return class_folders(tmp_path / "val", each=2)


@pytest.fixture
def imagenet(tmp_path):
    for split in ("train", "val"):
        for label, wnid in enumerate(WNIDS):
            for i in range(2):
                save(
                    tmp_path / "ilsvrc" / split / wnid / f"{wnid}_{i}.JPEG",
                    seed=label,
                    size=(70, 50),
                )
    return tmp_path / "ilsvrc"


def folder(root, val, **kwargs):
    return ImageFolder(
        str(root), val if isinstance(val, int) else str(val), 16, num_workers=0, **kwargs
    )


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_images_are_centre_crops_of_the_files(tmp_path, mode, channels):
    root = class_folders(tmp_path / "train", mode=mode)
    data = folder(root, root, channels=channels)
    images, labels, index = next(iter(data.val_dataloader()))
    assert images.shape == (6, *data.image_shape) == (6, channels, 16, 16)
    for image, label, i in zip(images, labels.tolist(), index.tolist(), strict=True):
        crop = np.array(center_crop(picture(100 * label + i % 3, mode), 16)).reshape(
            16, 16, channels
        )
        assert np.array_equal(image.permute(1, 2, 0).numpy(), crop)
    assert images.dtype == torch.uint8


def test_labels_and_classes_follow_the_folders(root, val):
    data = folder(root, val)
    assert (data.class_names, data.num_classes) == (("a", "b"), 2)
    assert next(iter(data.val_dataloader()))[1].tolist() == [0, 0, 1, 1]


def test_a_flat_folder_has_no_classes(tmp_path):
    for i in range(4):
        save(tmp_path / "flat" / f"{i}.png", seed=i)
    data = folder(tmp_path / "flat", 1)
    assert (data.class_names, data.num_classes) == ((), None)
    assert data.dataset("train")[0][1].tolist() == [-1]
    assert [len(data.dataset(split)) for split in ("train", "val")] == [3, 1]


def test_held_out_images_are_no_training_images_and_always_the_same(root):
    data = folder(root, 2)
    names = {split: {*data.select(split).names} for split in ("train", "val")}
    assert len(names["val"]) == 2
    assert len(names["train"] | names["val"]) == 6
    assert names["val"] == {b"a/2.png", b"b/0.png"}


def test_without_augmentation_training_images_are_their_centre_crops(root, val):
    data = folder(root, val, batch_size=6)
    images, _, index = next(iter(data.train_dataloader()))
    assert torch.equal(images, data.images("train")[index])


def test_bad_files_of_either_split_are_named_before_training(root, val):
    truncate(save(val / "a" / "odd.jpg", size=(90, 90)))
    with pytest.raises(ValueError, match=r"val.*a/odd\.jpg cannot be read"):
        folder(root, val).prepare_data()
    with pytest.raises(ValueError, match=r"odd\.jpg"):
        folder(root, val).images("train")  # also where nobody called prepare_data


def test_mixed_modes_are_refused_unless_conversion_is_asked_for(root, val):
    save(root / "a" / "grey.png", mode="L")
    with pytest.raises(ValueError, match=r"a/grey\.png has mode L, not RGB.*strict=False"):
        folder(root, val).prepare_data()
    grey = folder(root, val, strict=False).dataset("train")[3][0]
    assert torch.equal(grey[0, 0], grey[0, 2])


def test_small_pictures_are_enlarged_only_on_demand(root, val):
    save(root / "b" / "small.png", size=(12, 9))
    with pytest.raises(ValueError, match=r"small\.png is only 9 pixels"):
        folder(root, val).prepare_data()
    assert folder(root, val, strict=False).images("train").shape == (7, 3, 16, 16)


def test_a_file_that_breaks_after_the_check_is_named_when_it_is_read(root, val):
    data = folder(root, val)
    dataset = data.dataset("train")
    truncate(root / "b" / "0.png")
    with pytest.raises(OSError, match=r"b/0\.png cannot be read"):
        dataset[3]


def test_the_fingerprint_follows_files_and_crop_but_not_the_place_of_the_folder(root, tmp_path):
    def fingerprints(where, image_size=16):
        data = ImageFolder(str(where), 2, image_size)
        return data.fingerprint("train"), data.fingerprint("val")

    shutil.copytree(root, tmp_path / "moved", copy_function=shutil.copy2)
    first = fingerprints(root)
    assert len(set(first)) == 2
    assert fingerprints(tmp_path / "moved") == first
    assert not {*fingerprints(root, image_size=17)} & {*first}
    os.utime(root / "a" / "0.png", ns=(0, 1))
    assert not {*fingerprints(root)} & {*first}


def test_nothing_is_written_into_the_data(root, tmp_path):
    folder(root, 2).prepare_data()
    assert all(path.suffix == ".png" for path in root.rglob("*") if path.is_file())
    assert list((tmp_path / "cache" / "lit-diffusion").iterdir())


def test_a_home_folder_is_understood(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root.parent))
    assert folder("~/train", 2).folder("train") == root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"channels": 5}, r"channels must be 1 \(grey\), 3 \(RGB\), 2 or 4 \(with alpha\), got 5"),
        ({"image_size": 0}, "image_size must be >= 1, got 0"),
        ({"val": 0}, "val must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(root, arguments, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(**{"train": str(root), "val": 1, "image_size": 16} | arguments)


def test_holding_out_everything_is_refused(root):
    with pytest.raises(ValueError, match="val=6 images cannot be held out of the 6"):
        folder(root, 6).images("val")


def test_files_are_loaded_by_several_processes_by_default(root):
    assert 1 <= folder(root, 2).default_workers() <= 16
    data = ImageFolder(str(root), 2, 16)
    assert data.val_dataloader().num_workers == data.default_workers()
    data.trainer = Trainer(accelerator="cpu", devices=1000, logger=False)
    assert data.default_workers() == 1  # the processes of a node share its CPUs


def test_imagenet_is_read_from_its_two_folders(imagenet):
    data = ImageNet(str(imagenet), image_size=32, batch_size=4, num_workers=0)
    data.prepare_data()
    assert (data.class_names, data.image_shape) == (WNIDS, (3, 32, 32))
    images, labels, _ = next(iter(data.val_dataloader()))
    file = Image.open(imagenet / "val" / WNIDS[1] / f"{WNIDS[1]}_0.JPEG")
    expected = torch.from_numpy(np.array(center_crop(file, 32))).permute(2, 0, 1)
    assert torch.equal(images[2], expected)
    assert labels.tolist() == [0, 0, 1, 1]


def test_imagenet_converts_grey_and_cmyk_and_enlarges_small_files(imagenet):
    save(imagenet / "train" / WNIDS[0] / "grey.JPEG", mode="L")
    save(imagenet / "train" / WNIDS[0] / "cmyk.JPEG", mode="CMYK")
    save(imagenet / "train" / WNIDS[0] / "small.JPEG", size=(20, 20))
    data = ImageNet(str(imagenet), image_size=32, num_workers=0)
    assert data.images("train").shape == (7, 3, 32, 32)


def test_imagenet_refuses_folders_that_are_not_its_classes(tmp_path):
    with pytest.raises(FileNotFoundError, match="train"):
        ImageNet(str(tmp_path), 32).prepare_data()
    class_folders(tmp_path / "train")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"such as n01440764 in .*train, got a"):
            ImageNet(str(tmp_path), 32).prepare_data()


def test_imagenet_wants_its_validation_files_sorted(imagenet):
    shutil.rmtree(imagenet / "val")
    save(imagenet / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match=r"In no class folder: .*00000001\.JPEG\. Move"):
        ImageNet(str(imagenet), 32).prepare_data()


def test_imagenet_is_restored_from_its_hyperparameters(imagenet):
    data = ImageNet(str(imagenet), image_size=32, flip=True, batch_size=3)
    again = ImageNet(**data.hparams)
    assert (again.root, again.image_size, again.flip, again.batch_size) == (
        Path(imagenet),
        32,
        True,
        3,
    )


def test_other_classes_at_a_resume_are_told(root, val):
    data = folder(root, val, batch_size=2)
    state = data.state_dict()
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.state.fn = TrainerFn.FITTING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.load_state_dict(state)
    told = r"classes were \['x'\], and labels now mean"
    with pytest.warns(UserWarning, match=told):
        data.load_state_dict(state | {"class_names": ["x"]})
