import os
import re
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from support.pixels import random_images
from torch.utils.data import TensorDataset
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.metrics.images import (
    FolderImages,
    ImageSet,
    as_image_set,
    open_images,
    read_image,
    select_images,
    to_uint8,
)

LEVELS = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)


@pytest.mark.parametrize("images", [LEVELS, LEVELS / 255, LEVELS.double() / 127.5 - 1])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda images: images, None),
        (lambda images: (images, torch.zeros(1)), None),
        (lambda images: {"cls": torch.zeros(1), "jpg": images, "txt": ["a"]}, None),
        (lambda images: {"jpg": images, "mask": images == 0}, "jpg"),
        (lambda images: {"deep": {"jpg": images}}, lambda batch: batch["deep"]["jpg"]),
        (lambda images: {"image": images.permute(0, 2, 3, 1)}, None),  # channels last
    ],
)
def test_eight_bit_images_are_read_at_their_place_and_level(images, make, where):
    assert torch.equal(to_uint8(make(images), where), LEVELS)


def test_a_range_is_taken_only_where_no_other_fits():
    grey = torch.full((1, 1, 2, 2), 0.6)  # level 153 over [0, 1] and 204 over [-1, 1]
    with pytest.raises(TypeError, match="which values are black"):
        to_uint8(grey)
    assert (to_uint8(torch.ones(1, 1, 2, 2)) == 255).all()  # white in both
    with pytest.raises(TypeError, match=r"torch.int64 with values from 0 to 255"):
        to_uint8(LEVELS.long())


@pytest.mark.parametrize(
    "images",
    [
        torch.linspace(0, 1, 300),
        torch.linspace(-1, 1, 300),
        LEVELS.float(),
        LEVELS * torch.nan,
    ],
)
def test_other_floats_are_refused_with_what_to_write_and_it_works(images):
    batch = {"jpg": images.reshape(1, 1, 1, -1)}
    with pytest.raises(TypeError, match=r"images=lambda") as refused:
        to_uint8(batch)
    advice = re.search(r"images=(lambda .*torch.uint8\))", str(refused.value))[1]
    images = to_uint8(batch, eval(advice, {"torch": torch}))
    assert torch.equal(images, (255 * batch["jpg"]).round().clamp(0, 255).to(torch.uint8))


@pytest.mark.parametrize("images", [LEVELS.long(), LEVELS.float()])
def test_levels_of_another_dtype_are_refused_with_what_to_write_and_it_works(images):
    with pytest.raises(TypeError, match="If black is 0 and white is 255") as refused:
        to_uint8([images])
    advice = re.search(r"images=(lambda .*torch.uint8\))", str(refused.value))[1]
    pattern = r"replace (.*) in this .* white is 255, replace it by (.*)\.$"
    levels = re.search(pattern, str(refused.value))
    function = eval(advice.replace(*levels.groups()), {"torch": torch})
    assert torch.equal(to_uint8([images], function), LEVELS)


@pytest.mark.parametrize(
    ("batch", "where", "message"),
    [
        ({"jpg": LEVELS, "mask": LEVELS}, None, r"which of \['jpg', 'mask'\] .* images=\"image\""),
        (
            {"jpg": LEVELS},
            "png",
            r"images='png' is not an index or key .* dictionary with \['jpg'\]",
        ),
        (
            [torch.zeros(3, 4)],
            None,
            r"got torch.float32 \(3, 4\) from a batch that is of type list; say",
        ),
    ],
)
def test_a_batch_without_images_is_refused_with_what_it_has(batch, where, message):
    with pytest.raises(TypeError, match=message):
        select_images(batch, where, ndim=4)


def write(folder, images):
    for number, image in enumerate(images):
        to_pil_image(image).save(folder / f"{number:04d}.png")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_and_an_npz_give_the_pixels_that_were_written_in_order(tmp_path, channels):
    images = random_images(5, 0, channels, size=7)
    write(tmp_path, images)
    np.savez(tmp_path / "some.npz", images.permute(0, 2, 3, 1).numpy())
    assert torch.equal(torch.stack(list(open_images(tmp_path))), images)
    assert torch.equal(torch.stack([x for (x,) in open_images(tmp_path / "some.npz")]), images)


def test_a_decompression_bomb_and_what_is_no_file_are_refused_by_name(tmp_path):
    bomb = tmp_path / "bomb.png"
    Image.new("L", (1, 1)).save(bomb)
    data = bytearray(bomb.read_bytes())
    data[16:24] = (2**30).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    bomb.write_bytes(data)
    with pytest.raises(ValueError, match=r"bomb\.png is damaged or no image .*bomb"):
        read_image(bomb)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"pipe\.png is not a regular file"):
        read_image(tmp_path / "pipe.png")


@pytest.mark.parametrize(
    ("size", "mode", "message"),
    [(7, "1", r"0002\.png has mode 1; images must be of mode L, LA"), (9, "L", r"is \(1, 9, 9\)")],
)
def test_a_file_that_does_not_fit_is_named_and_the_overview_is_no_sample(
    tmp_path, size, mode, message
):
    write(tmp_path, random_images(3, 0, size=7))
    to_pil_image(random_images(1, 1, size=30)[0]).save(tmp_path / "grid.png")
    assert len(list(FolderImages(tmp_path))) == 3
    to_pil_image(random_images(1, 1, size=size)[0]).convert(mode).save(tmp_path / "0002.png")
    with pytest.raises(ValueError, match=message):
        list(open_images(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((4, 5), np.uint8), r"must contain an array arr_0, uint8 \(N, H, W, C\)"),
        (np.array([{"a": 1}], dtype=object), "allow_pickle"),
        (b"text", r"some\.npz is damaged or no \.npz"),
    ],
)
def test_an_npz_of_something_else_is_refused_and_not_unpickled(tmp_path, content, message):
    path = tmp_path / "some.npz"
    path.write_bytes(content) if isinstance(content, bytes) else np.savez(path, content)
    with pytest.raises(ValueError, match=message):
        open_images(path)


def test_the_fingerprint_changes_with_one_pixel_and_with_the_shape_only():
    images = random_images(300, 0)
    changed = images.clone()
    changed[299, 0, 1, 1] ^= 1
    prints = [
        as_image_set(v, "x").fingerprint
        for v in (images, images.clone(), changed, images.view(300, 1, 4, 1))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("name", ["cls", None])
def test_batches_have_every_image_once_with_its_label_wherever_it_is(name):
    images, labels = random_images(7, 0), torch.arange(7) % 3
    if name is None:
        images_set = ImageSet("x", TensorDataset(images, labels))
    else:
        samples = [{"image": x, name: k % 3, "index": k} for k, x in enumerate(images)]
        images_set = ImageSet("x", samples)
    batches, batch_labels = zip(*images_set.batches(3), strict=True)
    assert torch.equal(torch.cat(batches), images)
    assert batch_labels == ([0, 1, 2], [0, 1, 2], [0])
    assert [labels for _, labels in images_set.batches(3, [4, 1])] == [[1, 1]]
