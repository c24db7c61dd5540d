import os
import re
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from support.pixels import random_images
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.metrics.images import (
    FolderImages,
    open_images,
    read_image,
    select_images,
    to_uint8,
)

LEVELS = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
SCALED = [
    LEVELS / 255,
    (LEVELS / 255 - 0.5) / 0.5,
    LEVELS.double() / 127.5 - 1,
]


@pytest.mark.parametrize("images", [LEVELS, *SCALED])
@pytest.mark.parametrize(
    ("made", "where"),
    [
        (lambda images: images, None),
        (lambda images: (images, torch.zeros(1)), None),
        (lambda images: [torch.zeros(1), images], 1),
        (lambda images: {"cls": torch.zeros(1), "jpg": images, "txt": ["a"]}, None),
        (lambda images: {"jpg": images, "mask": images == 0}, "jpg"),
        (lambda images: {"deep": {"jpg": images}}, lambda batch: batch["deep"]["jpg"]),
    ],
)
def test_eight_bit_images_are_found_at_their_place_and_level(images, made, where):
    assert torch.equal(to_uint8(made(images), where), LEVELS)


def test_a_range_is_taken_only_where_no_other_fits():
    grey = torch.full((1, 1, 2, 2), 0.6)  # level 153 over [0, 1] and 204 over [-1, 1]
    with pytest.raises(TypeError, match="which numbers are black"):
        to_uint8(grey)
    assert (to_uint8(torch.ones(1, 1, 2, 2)) == 255).all()  # white in both


@pytest.mark.parametrize(
    "images",
    [
        torch.linspace(0, 1, 300),
        torch.linspace(-1, 1, 300),
        LEVELS / 100,
        LEVELS.float(),
        LEVELS * torch.nan,
    ],
)
def test_other_floats_are_refused_with_what_to_write_and_it_works(images):
    batch = {"jpg": images.reshape(1, 1, 1, -1)}
    with pytest.raises(TypeError, match=r"images=lambda") as refused:
        to_uint8(batch)
    written = re.search(r"images=(lambda .*torch.uint8\))", str(refused.value))[1]
    found = to_uint8(batch, eval(written, {"torch": torch}))
    assert torch.equal(found, (255 * batch["jpg"]).round().clamp(0, 255).to(torch.uint8))


def test_whole_numbers_of_other_types_are_refused():
    with pytest.raises(TypeError, match=r"torch.int64 from 0 to 255"):
        to_uint8(LEVELS.long())


@pytest.mark.parametrize(("shape", "expected"), [((2, 8, 8, 3), (2, 3, 8, 8)), ((2, 3, 8, 4),) * 2])
def test_channels_that_are_last_are_put_first(shape, expected):
    assert select_images({"image": torch.zeros(shape)}).shape == expected


@pytest.mark.parametrize(
    ("batch", "where", "message"),
    [
        ({"jpg": LEVELS, "mask": LEVELS}, None, r"which of \['jpg', 'mask'\] .* images=\"image\""),
        ({"jpg": LEVELS}, "png", r"images='png' finds nothing in a batch with \['jpg'\]"),
        ([LEVELS], 3, "images=3 finds nothing in a batch list"),
        ([torch.zeros(3, 4)], None, r"got torch.float32 \(3, 4\) of a batch list; say where"),
        ([], None, "got list of a batch list"),
    ],
)
def test_a_batch_without_images_is_refused_with_what_it_has(batch, where, message):
    with pytest.raises(TypeError, match=message):
        select_images(batch, where, ndim=4)


def write(folder, images):
    for number, image in enumerate(images):
        to_pil_image(image).save(folder / f"{number:04d}.png")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_gives_the_pixels_that_were_written_in_order(tmp_path, channels):
    images = random_images(5, 0, channels, size=7)
    write(tmp_path, images)
    assert torch.equal(torch.stack(list(open_images(tmp_path))), images)


def test_the_overview_beside_samples_is_no_sample(tmp_path):
    write(tmp_path, random_images(3, 0, size=7))
    to_pil_image(random_images(1, 1, size=30)[0]).save(tmp_path / "grid.png")
    assert len(FolderImages(tmp_path)) == 3


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_images(tmp_path)


def test_the_file_that_is_unreadable_is_named(tmp_path):
    write(tmp_path, random_images(3, 0, size=7))
    (tmp_path / "0001.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"0001\.png is not a readable image"):
        list(open_images(tmp_path))


def test_the_file_of_another_mode_is_named(tmp_path):
    write(tmp_path, random_images(3, 0, size=7))
    to_pil_image(random_images(1, 1, size=7)[0]).convert("1").save(tmp_path / "0002.png")
    with pytest.raises(ValueError, match=r"0002\.png has mode 1; images must be of mode L, LA"):
        list(open_images(tmp_path))


def test_the_file_of_another_size_is_named(tmp_path):
    write(tmp_path, random_images(3, 0, size=7))
    to_pil_image(random_images(1, 1, size=9)[0]).save(tmp_path / "0002.png")
    with pytest.raises(ValueError, match=r"0002\.png is \(1, 9, 9\)"):
        list(open_images(tmp_path))


def test_an_npz_of_images_is_read_channels_first(tmp_path):
    images = random_images(4, 0, channels=3, size=5)
    np.savez(tmp_path / "some.npz", images.permute(0, 2, 3, 1).numpy())
    assert torch.equal(
        torch.stack([image for (image,) in open_images(tmp_path / "some.npz")]), images
    )


@pytest.mark.parametrize("array", [np.zeros((4, 5, 5, 3), np.float32), np.zeros((4, 5), np.uint8)])
def test_an_npz_of_something_else_is_refused(tmp_path, array):
    np.savez(tmp_path / "some.npz", array)
    with pytest.raises(ValueError, match=r"must hold arr_0, uint8 \(N, H, W, C\)"):
        open_images(tmp_path / "some.npz")


def test_an_npz_with_a_pickle_inside_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "some.npz", np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        open_images(tmp_path / "some.npz")


def test_another_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a folder"):
        open_images(tmp_path / "missing")


def test_a_decompression_bomb_and_what_is_no_file_are_refused_by_name(tmp_path):
    bomb = tmp_path / "bomb.png"
    Image.new("L", (1, 1)).save(bomb)
    data = bytearray(bomb.read_bytes())
    data[16:24] = (2**30).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    bomb.write_bytes(data)
    with pytest.raises(ValueError, match=r"bomb\.png is not a readable image: .*bomb"):
        read_image(bomb)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"pipe\.png is no regular file"):
        read_image(tmp_path / "pipe.png")


def test_a_broken_npz_is_refused_by_name(tmp_path):
    for content in (b"", b"text", b"PK\x03\x04"):
        (tmp_path / "real.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"real\.npz cannot be read as \.npz"):
            open_images(tmp_path / "real.npz")
