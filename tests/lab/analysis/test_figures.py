from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lit_diffusion.lab.analysis import figures
from lit_diffusion.lab.analysis.consistency import consistency
from lit_diffusion.lab.analysis.hessian import Spectrum
from lit_diffusion.lab.analysis.interpolation import Interpolation
from lit_diffusion.lab.analysis.landscape import Landscape


def ink(path):
    """Share of pixels that are not white."""
    pixels = np.array(Image.open(path).convert("L"))
    return (pixels < 250).mean()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_a_model_and_a_column_a_seed(tmp_path, channels):
    torch.manual_seed(0)
    images = torch.randint(256, (3, 5, channels, 8, 8), dtype=torch.uint8)
    found = consistency(images, ["a", "b", "c"])
    figures.draw_consistency(found, images, tmp_path / "a.png")
    figures.draw_consistency(found, images, tmp_path / "b.png", seeds=2)
    wide, narrow = (Image.open(tmp_path / name).width for name in ("a.png", "b.png"))
    assert wide > narrow
    assert ink(tmp_path / "a.png") > 0.2


def test_lines_and_surfaces_and_spectra_are_drawn(tmp_path):
    alphas, axis = np.linspace(0, 1, 5), np.linspace(-1, 1, 4)
    line = Interpolation(["u", "v"], alphas, np.array([1 + alphas, 2 - alphas]))
    figures.draw_interpolation({"as they are": line, "aligned": line}, tmp_path / "line.png")
    values = np.stack([1 + np.add.outer(axis**2, axis**2)] * 2)
    plane = Landscape(["u", "v"], axis, axis, values)
    figures.draw_landscape(plane, tmp_path / "plain.png")
    figures.draw_landscape(plane, tmp_path / "way.png", np.array([[-0.5, 0.5], [0.5, -0.5]]))
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "way.png").read_bytes()
    nodes = np.array([[3.0, 1.0, np.nan]])
    spectrum = Spectrum(10, nodes, np.array([[0.5, 0.5, np.nan]]))
    figures.draw_spectra({"u": spectrum}, tmp_path / "spectra.png")
    figures.draw_spectra({"u": replace(spectrum, weights=spectrum.weights / 2)}, tmp_path / "b.png")
    assert (tmp_path / "spectra.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    negative = Landscape(["u"], axis, axis, values[:1] - 2)
    figures.draw_landscape(negative, tmp_path / "below.png")
    assert all(ink(tmp_path / name) > 0.01 for name in ("line.png", "way.png", "spectra.png"))
