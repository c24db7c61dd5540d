import logging
import os
import shutil
import warnings
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from support.pictures import class_folders, picture, save, truncate
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.data import cropped_images
from lit_diffusion.data.cropped_images import Requirements, center_crop
from lit_diffusion.data.image_folder import (
    ImageFolder,
    ImageNet,
    check_images,
    list_class_folders,
    list_images,
)

WNIDS = ("n01440764", "n01443537")


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
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
                file = tmp_path / "ilsvrc" / split / wnid / f"{wnid}_{i}.JPEG"
                save(file, seed=label, size=(70, 50))
    return tmp_path / "ilsvrc"


def folder(root, val, **kwargs):
    val = val if isinstance(val, int) else str(val)
    return ImageFolder(str(root), val, 16, num_workers=0, **kwargs)


def check(root, strict=True, full=True, image_size=16):
    requirements = Requirements(image_size, 3, strict, full)
    listing = list_images(root, list_class_folders(root))
    check_images(listing, requirements, root.parent / "cache", threads=2)


def sixteen_bit(path):
    levels = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40
    Image.fromarray(levels).save(path)


UNUSABLE = {
    "text.png": lambda path: path.write_text("no picture"),
    "truncated.jpg": lambda path: truncate(save(path, size=(200, 200))),
    "empty.png": lambda path: path.touch(),
    "deep.png": sixteen_bit,
    "long.png": lambda path: save(path, size=(800_000, 1)),  # 16 x 12,800,000 pixels if enlarged
}
CONVERTIBLE = {
    "cmyk.jpg": lambda path: save(path, mode="CMYK"),
    "grey.png": lambda path: save(path, mode="L"),
    "small.png": lambda path: save(path, size=(40, 15)),
}


@pytest.mark.parametrize("name", [*UNUSABLE, *CONVERTIBLE])
def test_odd_files_are_named_and_converted_only_on_demand_and_without_loss(root, name):
    (UNUSABLE | CONVERTIBLE)[name](root / "b" / name)
    option = r"used: --data\.init_args\.strict=false .*" if name in CONVERTIBLE else ""
    message = rf"1 of 7 files .*{option}: b/{name} (cannot|has|is)"
    with pytest.raises(ValueError, match=message):
        check(root)
    if "truncated" in name:
        check(root, full=False)
    if name in CONVERTIBLE:
        check(root, strict=False)
        assert folder(root, root, strict=False).images("train").shape == (7, 3, 16, 16)
    else:
        with pytest.raises(ValueError, match=f"b/{name}"):
            check(root, strict=False)


def test_a_folder_that_passed_is_not_read_again_until_it_or_the_requirements_change(root, caplog):
    caplog.set_level(logging.INFO)

    def reads(**requirements):
        caplog.clear()
        check(root, **requirements)
        return bool(caplog.records)

    assert [reads(), reads()] == [True, False]
    assert [reads(image_size=8), reads(image_size=8)] == [True, False]
    os.utime(root / "a" / "0.png", ns=(0, 1))
    assert [reads(), reads()] == [True, False]
    save(root / "a" / "new.png")
    assert [reads(), reads()] == [True, False]


def test_a_second_start_stats_each_file_once_and_opens_none(tmp_path, monkeypatch):
    def calls(num):
        root = class_folders(tmp_path / str(num), "a", num)
        folder(root, 1).prepare_data()
        with monkeypatch.context() as patch:
            stat, scandir = Mock(wraps=os.stat), Mock(wraps=os.scandir)
            patch.setattr(os, "stat", stat)
            patch.setattr(os, "scandir", scandir)
            patch.setattr(cropped_images, "open_image", None)  # which would fail
            folder(root, 1).prepare_data()
            return stat.call_count, scandir.call_count

    (stats, scans), (more_stats, as_many_scans) = calls(3), calls(5)
    assert more_stats - stats == 2
    assert as_many_scans == scans


def test_files_are_sorted_and_labelled_by_their_class_folder(root):
    path = save(root / "b" / "Zw\u00f6lf" / "\u732b.PNG")
    (root / "a" / ".hidden").touch()
    listing = list_images(root, ("0", "a", "aa", "b"))
    names = [os.fsdecode(name) for name in listing.names]
    assert names[:6] == ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png", "b/2.png"]
    assert listing.labels.tolist() == [1, 1, 1, 3, 3, 3, 3]
    assert listing.path(6) == path


def test_links_are_followed_unless_they_lead_back(root, tmp_path):
    save(tmp_path / "elsewhere" / "0.png")
    for name, target in {"up": root, "here": ".", "top": "/", "other": "../../elsewhere"}.items():
        (root / "a" / name).symlink_to(target)
    (tmp_path / "elsewhere" / "back").symlink_to(root / "a")
    names = [os.fsdecode(name) for name in list_images(root, ("a", "b")).names]
    assert names == [f"a/{i}.png" for i in range(3)] + ["a/other/0.png"] + [
        f"b/{i}.png" for i in range(3)
    ]


def test_missing_empty_and_unknown_folders_are_named(root):
    for train, val, option in (("nowhere", root, "train"), (root, "nowhere", "val")):
        with pytest.raises(FileNotFoundError, match=rf"--data\.{option}: .* nowhere .here: /"):
            folder(train, val).prepare_data()
    with pytest.raises(ValueError, match="train/b is not among the 1 class folders"):
        list_images(root, ("a",))
    (root / "c").mkdir()
    with pytest.raises(ValueError, match="train/c holds no images"):
        list_images(root, ("a", "b", "c"))


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_images_are_centre_crops_of_the_files(tmp_path, mode, channels):
    root = class_folders(tmp_path / "train", mode=mode)
    data = folder(root, root, channels=channels, batch_size=6)
    images, labels, index = next(iter(data.val_dataloader()))
    assert images.shape == (6, *data.image_shape) == (6, channels, 16, 16)
    for image, label, i in zip(images, labels.tolist(), index.tolist(), strict=True):
        crop = center_crop(picture(100 * label + i % 3, mode), 16)
        assert torch.equal(image, pil_to_tensor(crop))
    images, _, index = next(iter(data.train_dataloader()))  # without augmentation
    assert torch.equal(images, data.images("train")[index])


def test_labels_and_classes_follow_the_folders(root, val, tmp_path):
    data = folder(root, val)
    assert (data.class_names, data.num_classes) == (("a", "b"), 2)
    assert next(iter(data.val_dataloader()))[1].tolist() == [0, 0, 1, 1]
    for i in range(4):
        save(tmp_path / "flat" / f"{i}.png", seed=i)
    flat = folder(tmp_path / "flat", 1)
    assert (flat.class_names, flat.num_classes) == ((), None)
    assert flat.dataset("train")[0][1].tolist() == [-1]
    assert [len(flat.dataset(split)) for split in ("train", "val")] == [3, 1]


def test_held_out_images_are_no_training_images_and_always_the_same(root):
    names = {split: {*folder(root, 2).select(split).names} for split in ("train", "val")}
    assert len(names["train"] | names["val"]) == 6
    assert names["val"] == {b"a/2.png", b"b/0.png"}
    for num in (0, 6):
        with pytest.raises(ValueError, match=f"val={num} images cannot be held out of the 6"):
            folder(root, num).images("val")


def test_files_that_break_are_named_before_training_and_when_they_are_read(root, val):
    dataset = folder(root, val).dataset("train")
    truncate(root / "b" / "0.png")
    with pytest.raises(ValueError, match=r"b/0\.png is damaged or no image"):
        dataset[3]
    truncate(save(val / "a" / "odd.jpg", size=(90, 90)))
    for check in (folder(root, 2).prepare_data, lambda: folder(val, val).images("train")):
        with pytest.raises(ValueError, match=r"(b/0\.png|a/odd\.jpg) cannot be read"):
            check()


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


def test_other_classes_at_a_resume_are_named(root, val):
    data = folder(root, val, batch_size=2)
    state = data.state_dict()
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.state.fn = TrainerFn.FITTING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"classes were \['x'\], and labels now mean"):
        data.load_state_dict(state | {"class_names": ["x"]})


def test_processes_divide_the_cores_unless_srun_did(monkeypatch):
    """As in torchrun.sbatch, where torchrun starts eight processes in one task of SLURM."""
    for name in ("SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cropped_images, "usable_cores", lambda: 64)
    data = ImageFolder("photos", 2, 16)
    data.trainer = Mock(num_devices=8)
    assert data.default_workers() == 8
    monkeypatch.setenv("SLURM_JOB_NAME", "diffusion")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert data.default_workers() == 16
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    assert data.default_workers() == 8


def test_imagenet_is_read_from_its_two_folders_and_converted(imagenet):
    data = ImageNet(str(imagenet), image_size=32, batch_size=4, num_workers=0)
    data.prepare_data()
    assert (data.class_names, data.image_shape) == (WNIDS, (3, 32, 32))
    images, labels, _ = next(iter(data.val_dataloader()))
    file = Image.open(imagenet / "val" / WNIDS[1] / f"{WNIDS[1]}_0.JPEG")
    assert torch.equal(images[2], pil_to_tensor(center_crop(file, 32)))
    assert labels.tolist() == [0, 0, 1, 1]


def test_imagenet_refuses_other_folders_than_its_classes(tmp_path, imagenet):
    with pytest.raises(FileNotFoundError, match="train"):
        ImageNet(str(tmp_path), 32).prepare_data()
    class_folders(tmp_path / "train")
    with pytest.raises(ValueError, match=r"such as n01440764 in .*train, got a"):
        ImageNet(str(tmp_path), 32).prepare_data()
    shutil.rmtree(imagenet / "val")
    save(imagenet / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match=r"In no class folder: .*01\.JPEG\. Move"):
        ImageNet(str(imagenet), 32).prepare_data()
