import logging
import os

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import class_folders, picture, save, truncate

from lit_diffusion.data.cropped_images import Requirements
from lit_diffusion.data.image_folder import check_images, list_images
from lit_diffusion.data.image_folder import list_class_folders as find_classes


def scan(root, cache, channels=3, strict=True, full=True, image_size=16):
    requirements = Requirements(image_size, channels, strict, full)
    check_images(list_images(root, find_classes(root)), requirements, cache, threads=2)


@pytest.fixture
def root(tmp_path):
    return class_folders(tmp_path / "pictures")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def text_named_png(folder):
    (folder / "odd.png").write_text("no picture")


def truncated_jpeg(folder):
    truncate(save(folder / "odd.jpg", size=(200, 200)))


def truncated_png(folder):
    truncate(save(folder / "odd.png", size=(200, 200)))


def empty_file(folder):
    (folder / "odd.png").touch()


def sixteen_bit_png(folder):
    levels = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40
    Image.fromarray(levels).save(folder / "odd.png")


def palette_png(folder):
    picture(0).convert("P").save(folder / "odd.png")


def cmyk_jpeg(folder):
    save(folder / "odd.jpg", mode="CMYK")


def grey_png(folder):
    save(folder / "odd.png", mode="L")


def small_png(folder):
    save(folder / "odd.png", size=(40, 15))


BROKEN = [text_named_png, truncated_jpeg, truncated_png, empty_file]
DEEP = [sixteen_bit_png]
CONVERTIBLE = [palette_png, cmyk_jpeg, grey_png, small_png]


@pytest.mark.parametrize("add", BROKEN + DEEP + CONVERTIBLE)
def test_an_odd_file_is_named(root, cache, add):
    add(root / "b")
    with pytest.raises(ValueError, match=r"1 of 7 files .*: b/odd\.(png|jpg) (cannot|has|is)"):
        scan(root, cache)


@pytest.mark.parametrize("add", BROKEN + DEEP)
def test_what_cannot_be_read_or_would_be_clipped_is_refused_even_if_not_strict(root, cache, add):
    add(root / "b")
    with pytest.raises(ValueError, match=r"b/odd\."):
        scan(root, cache, strict=False)


@pytest.mark.parametrize("add", CONVERTIBLE)
def test_other_modes_and_sizes_pass_if_not_strict(root, cache, add):
    add(root / "b")
    scan(root, cache, strict=False)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_a_mode_passes_for_its_number_of_channels_only(tmp_path, cache, mode, channels):
    folder = class_folders(tmp_path / mode, mode=mode)
    scan(folder, cache, channels=channels)
    with pytest.raises(ValueError, match=f"has mode {mode}, not"):
        scan(folder, cache, channels={1: 3, 3: 4, 4: 1}[channels])


def test_only_a_full_check_finds_truncated_files(root, cache):
    truncated_jpeg(root / "a")
    scan(root, cache, full=False)
    with pytest.raises(ValueError, match=r"a/odd\.jpg cannot be read"):
        scan(root, cache, full=True)


def test_ten_bad_files_are_named_and_the_others_counted(root, cache):
    for i in range(13):
        (root / "a" / f"bad{i:02}.png").touch()
    with pytest.raises(ValueError, match="13 of 19 files") as caught:
        scan(root, cache)
    assert "bad09.png" in str(caught.value)
    assert "bad10.png" not in str(caught.value)
    assert "and 3 more" in str(caught.value)


def test_a_folder_that_passed_is_not_read_again_until_it_changes(root, cache, caplog):
    caplog.set_level(logging.INFO)

    def reads():
        caplog.clear()
        scan(root, cache)
        return bool(caplog.records)

    assert [reads(), reads()] == [True, False]
    os.utime(root / "a" / "0.png", ns=(0, 1))
    assert [reads(), reads()] == [True, False]
    save(root / "a" / "new.png")
    assert [reads(), reads()] == [True, False]


def test_a_folder_that_failed_is_read_again(root, cache):
    text_named_png(root / "a")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"odd\.png"):
            scan(root, cache)


def test_what_passed_for_one_requirement_is_checked_for_another(root, cache):
    scan(root, cache, image_size=16)
    with pytest.raises(ValueError, match="only 30 pixels on its shorter side, less than 31"):
        scan(root, cache, image_size=31)


def test_files_are_sorted_and_labelled_by_their_class_folder(root):
    save(root / "b" / "deeper" / "9.PNG")
    (root / "a" / ".hidden").touch()
    listing = list_images(root, ("a", "b"))
    names = [os.fsdecode(name) for name in listing.names]
    assert names == [
        "a/0.png",
        "a/1.png",
        "a/2.png",
        "b/0.png",
        "b/1.png",
        "b/2.png",
        "b/deeper/9.PNG",
    ]
    assert listing.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert listing.path(6) == root / "b" / "deeper" / "9.PNG"


def test_labels_follow_the_training_classes(root):
    assert list_images(root, ("0", "a", "aa", "b")).labels.unique().tolist() == [1, 3]


def test_files_of_a_flat_folder_have_no_label(tmp_path):
    for i in range(3):
        save(tmp_path / f"{i}.jpg")
    assert list_images(tmp_path, ()).labels.tolist() == [-1, -1, -1]


def test_part_keeps_files_and_labels_together(root):
    part = list_images(root, ("a", "b")).subset(torch.tensor([0, 1, 0, 0, 0, 1]).bool())
    assert [part.path(0).name, part.path(1).name] == ["1.png", "2.png"]
    assert part.labels.tolist() == [0, 1]


def test_names_that_are_not_ascii_are_found(tmp_path):
    path = save(tmp_path / "Zw\u00f6lf" / "\u732b.png")
    assert list_images(tmp_path, find_classes(tmp_path)).path(0) == path


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_classes(tmp_path / "nowhere")


def test_an_empty_folder_is_named(tmp_path, root):
    with pytest.raises(ValueError, match="holds no images"):
        list_images(empty(tmp_path / "empty"), ())
    empty(root / "c")
    with pytest.raises(ValueError, match="pictures/c holds no images"):
        list_images(root, ("a", "b", "c"))


def empty(folder):
    folder.mkdir()
    return folder


def test_files_that_are_no_images_by_their_names_are_left_out_and_named(root, caplog):
    before = list_images(root, ("a", "b"))
    assert "Left out" not in caplog.text
    for name in ("a/notes.txt", "labels.csv"):
        (root / name).touch()
    with caplog.at_level("INFO"):
        after = list_images(root, ("a", "b"))
    assert f"(.jpg, .jpeg, .png, .ppm, .pgm, .bmp, .tif, .tiff, .webp): {root}/a/no" in caplog.text
    assert f"notes.txt, {root}/labels.csv." in caplog.text
    assert after.names.tolist() == before.names.tolist()
    assert after.stamp == before.stamp


def test_files_beside_class_folders_are_named_together(root):
    save(root / "stray.png"), save(root / "other.png")
    with pytest.raises(ValueError, match=r"In no class folder: .*other\.png, .*stray\.png\. Move"):
        list_images(root, ("a", "b"))


@pytest.mark.parametrize("target", [".", ".."])
def test_a_folder_with_a_link_to_itself_is_read_once(root, target):
    before = list_images(root, ("a", "b"))
    (root / "a" / "again").symlink_to(root / "a" / target, target_is_directory=True)
    assert list_images(root, ("a", "b")).names.tolist() == before.names.tolist()


def test_a_class_that_training_does_not_have_is_named(root):
    with pytest.raises(ValueError, match="pictures/b is not among the 1 class folders"):
        list_images(root, ("a",))
