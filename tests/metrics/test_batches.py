import re

import pytest
import torch

from lit_diffusion.metrics.batches import images_in, uint8_images

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
    assert torch.equal(uint8_images(made(images), where), LEVELS)


def test_a_range_is_taken_only_where_no_other_fits():
    grey = torch.full((1, 1, 2, 2), 0.6)  # level 153 over [0, 1] and 204 over [-1, 1]
    with pytest.raises(TypeError, match="which numbers are black"):
        uint8_images(grey)
    assert (uint8_images(torch.ones(1, 1, 2, 2)) == 255).all()  # white in both


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
        uint8_images(batch)
    written = re.search(r"images=(lambda .*torch.uint8\))", str(refused.value))[1]
    found = uint8_images(batch, eval(written, {"torch": torch}))
    assert torch.equal(found, (255 * batch["jpg"]).round().clamp(0, 255).to(torch.uint8))


def test_whole_numbers_of_other_types_are_refused():
    with pytest.raises(TypeError, match=r"torch.int64 from 0 to 255"):
        uint8_images(LEVELS.long())


@pytest.mark.parametrize(("shape", "expected"), [((2, 8, 8, 3), (2, 3, 8, 8)), ((2, 3, 8, 4),) * 2])
def test_channels_that_are_last_are_put_first(shape, expected):
    assert images_in({"image": torch.zeros(shape)}).shape == expected


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
        images_in(batch, where, ndim=4)
