import numpy as np
import torch
from PIL import Image

from lit_diffusion.cli.image_grids import GAP, table, text_image, tile


def test_small_images_are_enlarged_pixel_by_pixel():
    image = torch.randint(0, 256, (1, 1, 8, 8)).to(torch.uint8)
    large = np.array(tile(image, 64))
    assert large.shape == (64, 64, 3)
    block = np.kron(image[0, 0].numpy(), np.ones((8, 8), dtype=np.uint8))
    assert (large == block[..., None]).all()


def test_large_images_are_shrunk_to_twice_the_width():
    assert tile(torch.zeros(1, 3, 512, 256, dtype=torch.uint8), 64).size == (64, 128)


def test_every_picture_is_whole_and_in_the_middle_of_its_cell():
    sizes = [[(3, 9), (20, 2)], [(11, 4), (5, 5)]]
    colours = [["red", "green"], ["blue", "black"]]
    rows = [list(map(picture, *each)) for each in zip(sizes, colours, strict=True)]
    whole = np.array(table(rows))
    assert whole.shape == (9 + 5 + 2 * GAP, 11 + 20 + 2 * GAP, 3)
    for row, middle_y in zip(rows, (8.5, 23.5), strict=True):
        for each, middle_x in zip(row, (9.5, 33.0), strict=True):
            ys, xs = np.where((whole == np.array(each)[0, 0]).all(-1))
            assert len(xs) == each.width * each.height
            assert abs((xs.min() + xs.max() + 1) / 2 - middle_x) <= 1
            assert abs((ys.min() + ys.max() + 1) / 2 - middle_y) <= 1


def picture(size, colour):
    return Image.new("RGB", size, colour)


def test_nothing_of_a_text_is_cut_off():
    text = "DPMSolverPP2S, jpgq\n0.123"
    small = np.array(text_image(text))
    roomy = np.array(text_image(f"{text} \n "))[: small.shape[0] + 4]
    assert (small < 128).sum() == (roomy < 128).sum() > 100
