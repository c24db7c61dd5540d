"""MNIST, whole in memory."""

from pathlib import Path
from typing import Any

from torchvision.datasets import MNIST as Source

from lit_diffusion.data.base import Awaited, ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages


class MNIST(ImageDataModule):
    """60,000 training and 10,000 held-out grey digits of 28x28 pixels.

    Downloaded once where there is a network, otherwise expected in `root`.

    Args:
        root: folder that holds, or will hold, `MNIST/raw/train-images-idx3-ubyte` and so on.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: If files are missing and cannot be downloaded; says which, and where to
            put them.
        ValueError: If a file is cut or holds something else.

    Source: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits", 1998.
    """

    image_shape = (1, 28, 28)
    class_names = tuple("0123456789")

    def __init__(self, root: str = "data", **loader: Any) -> None:
        super().__init__(**loader)
        self.root = Path(root).expanduser()

    def check(self) -> None:
        """Download what is missing."""
        if self._missing():
            try:
                Source(self.root, download=True)
            except (OSError, RuntimeError) as error:
                raise FileNotFoundError(
                    f"The files of MNIST could not be downloaded ({error}). In {self._folder}: "
                    f"{', '.join(self._missing())} missing. Put these there, unpacked."
                ) from error

    def awaited(self) -> Awaited | None:
        """Whether files have yet to be downloaded."""
        if not self._missing():
            return None
        return Awaited(f"MNIST will be downloaded into {self.root}", needs_network=True)

    def load(self, split: Split) -> TensorImages:
        """Open a split."""
        try:
            files = Source(self.root, train=split == "train")
            images = files.data.view(-1, *self.image_shape)
            if len(images) != len(files.targets):
                raise ValueError(f"{len(images)} images and {len(files.targets)} labels")
        except (OSError, RuntimeError, ValueError, AssertionError, KeyError) as error:
            raise ValueError(f"The {split} files of MNIST in {self._folder}: {error}.") from error
        return TensorImages(images, files.targets.long())

    @property
    def _folder(self) -> Path:
        return self.root / "MNIST" / "raw"

    def _missing(self) -> list[str]:
        names = [Path(name).stem for name, _ in Source.resources]
        return [name for name in names if not (self._folder / name).is_file()]
