"""Images as torch-fidelity takes them."""

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from lit_diffusion.metrics.protocols import match_channels


class ColourImages(Dataset[Tensor]):
    """Images uint8 (3, H, W); grey is repeated.

    Args:
        images: map-style; a sample is an image uint8 (C, H, W), a batch of one, or a tuple that
            begins with either.
    """

    def __init__(self, images: Dataset[Any]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Tensor:
        sample = self._images[index]
        image: Tensor = sample[0] if isinstance(sample, tuple | list) else sample
        return match_channels(image[0] if image.ndim == 4 else image, 3)
