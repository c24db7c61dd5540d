"""Image sets to score, from the batches of any loader, folders, .npz files and data modules."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.files import IMAGE_MODES, checked_read, open_image

BatchKey: TypeAlias = int | str | Callable[..., Any] | None
"""How to get the images (N, C, H, W) of a batch: an index, a key, or a function of the batch. None
means the batch itself if it is a tensor, the first item of a tuple or list, or the only 4-d tensor
of a dictionary."""

LABEL_KEYS = ("label", "labels", "class", "class_label", "cls", "target", "y")
"""Keys of labels in batches that are dictionaries, in order of precedence."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")

OVERVIEWS = ("grid.png", "trajectory.png")
"""Names of files that `lit-diffusion sample` writes next to the samples; they are no samples."""


def select_images(batch: Any, key: BatchKey = None, ndim: int | None = None) -> Tensor:
    """Select the images of a batch, of any dtype and layout.

    Args:
        batch: batch of any loader.
        key: how to find the images: an index, a key, or a function of the batch. None uses the
            batch itself, its first part, or the one image tensor of a dictionary.
        ndim: required number of dimensions; None allows any.

    Raises:
        TypeError: if there are no such images. The message explains how to pass `key`.

    Example:
        >>> select_images({"image": torch.zeros(2, 3, 8, 8), "name": ["a", "b"]}).shape
        torch.Size([2, 3, 8, 8])
    """
    key = _default_key(batch) if key is None else key
    try:
        images = key(batch) if callable(key) else batch if key is None else batch[key]
    except (KeyError, IndexError) as error:
        raise TypeError(f"images={key!r} finds nothing in a batch {_describe(batch)}.") from error
    if not isinstance(images, Tensor) or ndim not in (None, images.ndim):
        raise TypeError(
            f"images must be (N, C, H, W), got {_describe(images)} of a batch {_describe(batch)}; "
            'pass where they are: images=0, images="image" or images=lambda batch: ....'
        )
    return images


def to_uint8(batch: Any, key: BatchKey = None) -> Tensor:
    """Convert the images of a batch to uint8 (N, C, H, W).

    Channels-last images are permuted. Floats are accepted if they are 256 evenly spaced levels in
    [0, 1] or in [-1, 1].

    Args:
        batch: batch of any loader.
        key: how to find the images: an index, a key, or a function of the batch. None has the same
            meaning as in `select_images`.

    Raises:
        TypeError: if the values are different. The message suggests a conversion.

    Example:
        >>> to_uint8([torch.tensor([-1.0, 0.6, 1.0]).view(1, 1, 1, 3)]).flatten().tolist()
        [0, 204, 255]
    """
    images = select_images(batch, key, ndim=4)
    channels = (1, 3, 4)
    if images.shape[1] not in channels and images.shape[3] in channels:
        images = images.permute(0, 3, 1, 2)
    if images.dtype == torch.uint8:
        return images
    candidates = []
    if images.is_floating_point():
        for factor, offset in ((255.0, 0.0), (127.5, 127.5)):  # of [0, 1] and of [-1, 1]
            levels = images.float() * factor + offset
            rounded = levels.round().clamp(0, 255)
            if (levels - rounded).abs().max() < 0.01:
                candidates.append(rounded.to(torch.uint8))
    if candidates and torch.equal(candidates[0], candidates[-1]):
        return candidates[0]
    key = _default_key(batch) if key is None else key
    where = "f(batch)" if callable(key) else "batch" if key is None else f"batch[{key!r}]"
    low, high = (float(bound) for bound in images.aminmax())
    raise TypeError(
        f"images are {images.dtype} from {low:.3g} to {high:.3g}, and it is not known which "
        f"numbers are black and white: if 0 and 1, pass images=lambda batch: (255 * {where})"
        f".round().clamp(0, 255).to(torch.uint8); if -1 and 1, use 127.5 * {where} + 127.5 in it."
    )


def _default_key(batch: Any) -> BatchKey:
    if not isinstance(batch, Mapping):
        return 0 if isinstance(batch, tuple | list) and batch else None
    keys = [key for key, v in batch.items() if isinstance(v, Tensor) and v.ndim == 4]
    if len(keys) != 1:
        raise TypeError(
            f"it is not known which of {sorted(map(str, batch))} in a batch are its images; pass "
            'the key, such as images="image".'
        )
    return keys[0]  # type: ignore[no-any-return]


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"with {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def read_image(path: Path) -> Tensor:
    """Read a grey or RGB file, with or without alpha, as uint8 (C, H, W).

    Raises:
        ValueError: if the file cannot be read, or has an unsupported mode, such as a palette.

    Example:
        >>> read_image(Path("cat.png")).shape  # doctest: +SKIP
        torch.Size([3, 32, 32])
    """
    with checked_read(path, "image") as file, open_image(file) as image:
        mode = image.mode
        pixels: Tensor | None = pil_to_tensor(image) if mode in IMAGE_MODES.values() else None
    if pixels is None:
        raise ValueError(
            f"{path} has mode {mode}; images must be of mode L, LA, RGB or RGBA: convert it."
        )
    return pixels


class FolderImages(Dataset[Tensor]):
    """Dataset of the PNG and JPEG files in a folder and its subfolders, sorted by path.

    An item is uint8 (C, H, W), with C = 1 for grey and 3 for RGB, or 2 and 4 with alpha. All files
    must have the same shape. Files named in `OVERVIEWS` are ignored.

    Raises:
        ValueError: if there are no images. When an item is read, also if its file is unreadable or
            has a different shape.

    Example:
        >>> FolderImages("samples")[0].shape  # doctest: +SKIP
        torch.Size([3, 32, 32])
    """

    def __init__(self, folder: str | Path) -> None:
        files = (p for p in Path(folder).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        self.paths = sorted(p for p in files if p.name not in OVERVIEWS)
        if not self.paths:
            raise ValueError(f"{folder} holds no {', '.join(IMAGE_SUFFIXES)} file.")
        self.shape = read_image(self.paths[0]).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = read_image(self.paths[index])
        if image.shape != self.shape:
            raise ValueError(
                f"{self.paths[index]} is {tuple(image.shape)} (C, H, W), but {self.paths[0].name} "
                f"is {tuple(self.shape)}; images that are scored together have one shape."
            )
        return image


def open_images(path: str | Path) -> Dataset[Any]:
    """Open a folder of PNG and JPEG files, or an .npz file with `arr_0` uint8 (N, H, W, C).

    guided-diffusion publishes samples and reference images in this .npz format.

    Raises:
        ValueError: if `path` is neither, or has unsupported content.

    Example:
        >>> len(open_images("samples"))  # doctest: +SKIP
        64
    """
    path = Path(path)
    if path.is_dir():
        return FolderImages(path)
    if path.suffix != ".npz" or not path.exists():
        raise ValueError(f"{path} is neither a folder of images nor an .npz file of them.")
    with checked_read(path, ".npz file") as file, np.load(file, allow_pickle=False) as arrays:
        images = arrays.get("arr_0")
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or not len(images):
        content = "none" if images is None else f"{images.dtype} {images.shape}"
        raise ValueError(f"{path} must hold arr_0, uint8 (N, H, W, C), N >= 1, got {content}.")
    return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2))


@dataclass(frozen=True)
class ImageSet:
    """A named set of images: samples to score, or a reference.

    Example:
        >>> images = as_image_set(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "zeros")
        >>> [(len(batch), labels) for batch, labels in images.batches(batch_size=3)]
        [(3, [-1, -1, -1]), (1, [-1])]
    """

    name: str  # split or path of the images
    dataset: Dataset[Any]  # map-style; batches hold images, and optionally labels
    collate: Callable[[list[Any]], Any] | None = None  # collate_fn of its DataLoaders
    num_workers: int = 0  # workers of its DataLoaders
    cached_fingerprint: Callable[[], str] | None = None  # avoids reading all images
    key: BatchKey = None  # how to get the images of a batch

    def __len__(self) -> int:
        if not hasattr(self.dataset, "__len__"):
            raise TypeError(
                f"{self.name}: {type(self.dataset).__name__} has no length; name a folder or an "
                ".npz file of images as the reference instead."
            )
        return len(self.dataset)

    def batches(
        self, batch_size: int, index: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield images uint8 (N, C, H, W) and their N labels, in the order of `index` (None: all).

        If a batch is a tuple or list, the labels are its second item. If it is a dictionary, the
        labels are the value of the first of `LABEL_KEYS` that it contains. If the labels are not an
        integer tensor (N,), all labels are -1.
        """
        subset = Subset(self.dataset, range(len(self)) if index is None else index)
        options: dict[str, Any] = {"num_workers": self.num_workers, "collate_fn": self.collate}
        for batch in DataLoader(subset, batch_size, **options):
            try:
                images = to_uint8(batch, self.key)
            except TypeError as error:
                raise TypeError(
                    f"{self.name}: {error} You can also set reference to a folder of images or to "
                    "an .npz file."
                ) from error
            labels: Any = None
            if isinstance(batch, tuple | list) and len(batch) > 1:
                labels = batch[1]
            elif isinstance(batch, Mapping):
                labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
            has_labels = isinstance(labels, Tensor) and labels.shape == (len(images),)
            if not has_labels or labels.is_floating_point():
                labels = torch.full((len(images),), -1)
            yield images, labels.long().tolist()

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any pixel."""
        if self.cached_fingerprint is not None:
            return self.cached_fingerprint()
        digest = hashlib.sha256()
        for images, _ in self.batches(256):
            digest.update(images.contiguous().numpy().tobytes())
        digest.update(repr(tuple(images.shape[1:])).encode())
        return digest.hexdigest()[:16]


def as_image_set(source: ImageSet | Tensor | str | Path, name: str) -> ImageSet:
    """Convert a tensor uint8 (N, C, H, W), or a path, to an `ImageSet`.

    Args:
        source: a tensor, the path of a folder or .npz file, or an `ImageSet`.
        name: name of a tensor.

    Example:
        >>> len(as_image_set(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "zeros"))
        4
    """
    if isinstance(source, ImageSet):
        return source
    if isinstance(source, Tensor):
        return ImageSet(name, TensorDataset(source))
    return ImageSet(str(source), open_images(source))


def evenly_spaced(size: int, num: int) -> list[int]:
    """List at most `num` evenly spaced indices from 0, ..., size - 1.

    Even spacing is used because data are often sorted by class.

    Example:
        >>> evenly_spaced(10, 4)
        [0, 2, 5, 7]
    """
    num = min(num, size)
    return [i * size // num for i in range(num)]


@runtime_checkable
class HasSplits(Protocol):
    """A data module whose splits can be read in order and without augmentation."""

    def in_order(self, split: Any) -> DataLoader[Any]:
        """Loader that visits every image of a split once."""

    def fingerprint(self, split: Any) -> str:
        """Hash of the images of a split."""


def open_split(data: HasSplits, name: str) -> ImageSet:
    """Open the images of the split "train", "val" or "test" of a data module.

    "test" means the split that the data module's attribute `tests_on` names. If there is no such
    attribute, it means "val".

    Example:
        >>> from lit_diffusion.data.digits import Digits
        >>> len(open_split(Digits(), "val"))
        360
    """
    split = getattr(data, "tests_on", "val") if name == "test" else name
    loader, fingerprint = data.in_order(split), partial(data.fingerprint, split)
    key = _refuse_latents if hasattr(data, "vae_sha256") else None
    return ImageSet(split, loader.dataset, loader.collate_fn, loader.num_workers, fingerprint, key)


def _refuse_latents(batch: object) -> Tensor:
    raise TypeError("the data are latents, but images must be compared with images.")
