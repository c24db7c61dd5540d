import pytest
from PIL import Image

from lit_diffusion.image_files import FORMATS, open_image


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_are_read(tmp_path, kind):
    Image.new("RGB", (3, 2)).save(tmp_path / "0.png", format=kind)
    with open_image(tmp_path / "0.png") as image:
        assert image.convert("RGB").size == (3, 2)


@pytest.mark.parametrize("kind", ["EPS", "GIF", "ICO", "PDF"])
def test_others_are_not_whatever_they_are_called(tmp_path, kind):
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png", format=kind)
    with pytest.raises(OSError, match="cannot identify"):
        open_image(tmp_path / "0.png")
