"""The images of a batch of anybody's loader: where they are and in which range.

The only place outside of codecs that makes levels 0 .. 255 of floats.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Where: TypeAlias = int | str | Callable[..., Any] | None
"""An index or key into a batch, or a function of it, that gives its images (N, C, H, W); None for
the batch itself, its first part, or the one image tensor of a dictionary."""


def images_in(batch: Any, where: Where = None, ndim: int | None = None) -> Tensor:
    """Images of any type, with `ndim` dimensions if given; those with channels last are turned.

    Raises:
        TypeError: where there are none, with what to write.
    """
    if where is None:
        where = _guessed(batch)
    try:
        images = where(batch) if callable(where) else batch if where is None else batch[where]
    except (KeyError, IndexError) as error:
        raise TypeError(f"images={where!r} finds nothing in a batch {_kind(batch)}.") from error
    if not isinstance(images, Tensor) or ndim not in (None, images.ndim):
        raise TypeError(
            f"images must be (N, C, H, W), got {_kind(images)} of a batch {_kind(batch)}; say "
            'where they are, as images=0, images="image" or images=lambda batch: ....'
        )
    colours = (1, 3, 4)
    turned = images.ndim == 4 and images.shape[1] not in colours and images.shape[3] in colours
    return images.permute(0, 3, 1, 2) if turned else images


def uint8_images(batch: Any, where: Where = None) -> Tensor:
    """Images uint8 (N, C, H, W).

    Floats are taken if they are 256 levels over [0, 1] or over [-1, 1], and not both.

    Raises:
        TypeError: of other numbers, with what to write.

    Example:
        >>> uint8_images([torch.tensor([-1.0, 0.6, 1.0]).view(1, 1, 1, 3)]).flatten().tolist()
        [0, 204, 255]
    """
    images = images_in(batch, where, ndim=4)
    if images.dtype == torch.uint8:
        return images
    fits = _levels(images) if images.is_floating_point() else []
    if not fits or not torch.equal(fits[0], fits[-1]):
        where = _guessed(batch) if where is None else where
        got = "f(batch)" if callable(where) else "batch" if where is None else f"batch[{where!r}]"
        low, high = (float(bound) for bound in images.aminmax())
        raise TypeError(
            f"images are {images.dtype} from {low:.3g} to {high:.3g}, and which numbers are black "
            f"and white is not known: write images=lambda batch: (255 * {got}).round()"
            f".clamp(0, 255).to(torch.uint8) if these are 0 and 1, 127.5 * {got} + 127.5 in it if "
            "they are -1 and 1."
        )
    return fits[0]


def _levels(images: Tensor) -> list[Tensor]:
    found = []
    for factor, offset in ((255.0, 0.0), (127.5, 127.5)):  # of [0, 1] and of [-1, 1]
        levels = images.float() * factor + offset
        whole = levels.round().clamp(0, 255)
        if (levels - whole).abs().max() < 0.01:
            found.append(whole.to(torch.uint8))
    return found


def _guessed(batch: Any) -> Where:
    if isinstance(batch, Mapping):
        found = [key for key, v in batch.items() if isinstance(v, Tensor) and v.ndim == 4]
        if len(found) != 1:
            raise TypeError(
                f"which of {sorted(map(str, batch))} in a batch are its images is not known; say "
                'it, as images="image".'
            )
        return found[0]  # type: ignore[no-any-return]
    return 0 if isinstance(batch, tuple | list) and batch else None


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"with {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
