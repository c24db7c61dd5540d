"""Codecs, which encode images to x0 (the clean data of the diffusion process) and decode x0."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_diffusion.protocols import Codec


@dataclass(frozen=True)
class PixelCodec:
    """Codec that scales uint8 images to [-1, 1].

    Encoding and then decoding an image returns exactly the same image.

    Example:
        >>> levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
        >>> torch.equal(PixelCodec().decode(PixelCodec().encode(levels)), levels)
        True
    """

    bounded: ClassVar[bool] = True

    def encoded_shape(self, image_shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Return `image_shape`, because x0 has the shape of the images."""
        return image_shape

    def encode(self, images: Tensor, /) -> Tensor:
        """Scale images uint8 (B, C, H, W) to float32 in [-1, 1]."""
        if images.dtype != torch.uint8:
            raise TypeError(
                f"images must be uint8 in [0, 255], got {images.dtype}; scale and round them."
            )
        return images.float() / 127.5 - 1

    def decode(self, x0: Tensor, /) -> Tensor:
        """Scale x0 to images uint8 (B, C, H, W): the nearest integers in [0, 255]."""
        return (x0 * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def encode_for_training(codec: Codec, images: Tensor) -> Tensor:
    """Encode images with `codec.encode_for_training` if the codec has it, else with `codec.encode`.

    Images uint8 (B, C, H, W) become x0 (B, C', H', W') float32.
    """
    return getattr(codec, "encode_for_training", codec.encode)(images)
