"""Open sets of images to score: tensors, folders, .npz files, data modules or other datasets."""

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

from lit_diffusion.files import IMAGE_MODES, checked_read, open_image, walk_files

BatchKey: TypeAlias = int | str | Callable[..., Any] | None
"""How to get the images (N, C, H, W) of a batch: an index, a key, or a function of the batch. None
selects the whole batch if the batch is a tensor, the first item if it is a tuple or list, and the
only 4-dimensional tensor if it is a dictionary."""

LABEL_KEYS = ("label", "labels", "class", "class_label", "cls", "target", "y")
"""Keys of labels in batches that are dictionaries, in order of precedence."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")

OVERVIEWS = ("grid.png", "trajectory.png")
"""Names of overview images that `lit-diffusion sample` writes next to the samples."""


def select_images(batch: Any, key: BatchKey = None, ndim: int | None = None) -> Tensor:
    """Select the images of a batch, of any dtype and layout.

    Args:
        batch: batch of any data loader.
        key: where the images are, as in `BatchKey`.
        ndim: required number of dimensions; None allows any number.

    Raises:
        TypeError: if the batch has no tensor at `key`, or if the tensor has the wrong number of
            dimensions. The message explains how to pass `key`.
    """
    key = _default_key(batch) if key is None else key
    try:
        images = key(batch) if callable(key) else batch if key is None else batch[key]
    except (KeyError, IndexError) as error:
        raise TypeError(
            f"images={key!r} is not an index or key of the batch, which is {_describe(batch)}."
        ) from error
    if not isinstance(images, Tensor) or ndim not in (None, images.ndim):
        raise TypeError(
            f"images must be a tensor (N, C, H, W), got {_describe(images)} from a batch that is "
            f"{_describe(batch)}; say where the images are, for example images=0, "
            'images="image" or images=lambda batch: ....'
        )
    return images


def to_uint8(batch: Any, key: BatchKey = None) -> Tensor:
    """Convert the images of a batch to uint8 (N, C, H, W).

    Channels-last images (N, H, W, C) are permuted. The values of floating-point images must be
    `k / 255` or `2 * k / 255 - 1` for integers k from 0 to 255. If it is not clear which of
    these two formulas holds, the function raises an error.

    Args:
        batch: batch of any data loader.
        key: where the images are, as in `BatchKey`.

    Raises:
        TypeError: if there are no images, or if the range of their values is not clear. The message
            suggests a conversion.

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
        for factor, offset in ((255.0, 0.0), (127.5, 127.5)):  # [0, 1] and [-1, 1]
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
        f"images are {images.dtype} with values from {low:.3g} to {high:.3g}, from which it is not "
        f"clear which values are black and white. If black is 0 and white is 1, pass "
        f"images=lambda batch: (255 * {where}).round().clamp(0, 255).to(torch.uint8). If black is "
        f"-1 and white is 1, replace 255 * {where} in this function by 127.5 * {where} + 127.5. If "
        f"black is 0 and white is 255, replace it by {where}."
    )


def _default_key(batch: Any) -> BatchKey:
    if not isinstance(batch, Mapping):
        return 0 if isinstance(batch, tuple | list) and batch else None
    keys = [key for key, v in batch.items() if isinstance(v, Tensor) and v.ndim == 4]
    if len(keys) != 1:
        raise TypeError(
            f"it is not clear which of {sorted(map(str, batch))} in a batch are the images; pass "
            'the key, for example images="image".'
        )
    return keys[0]


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dictionary with {sorted(map(str, value))}"
    return f"of type {type(value).__name__}"


def read_image(path: Path) -> Tensor:
    """Read a gray or RGB image file, with or without an alpha channel, as uint8 (C, H, W).

    Raises:
        ValueError: if the file cannot be read, or if the image is neither gray nor RGB. An alpha
            channel is allowed.
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

    An item is a uint8 image (C, H, W). C is 1 for gray and 3 for RGB images, plus 1 if there is an
    alpha channel. All images must have the same shape. Hidden files are ignored. Files with a name
    in `OVERVIEWS` are ignored too, because `lit-diffusion sample` writes these overviews next to
    its samples.

    Raises:
        OSError: if a folder cannot be read.
        ValueError: if there are no images. Indexing raises it if the file of the image is
            unreadable, or if the image differs in shape from the first image.
    """

    def __init__(self, folder: str | Path) -> None:
        files = (Path(file) for file in walk_files(folder))
        images = (file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)
        self.paths = sorted(image for image in images if image.name not in OVERVIEWS)
        if not self.paths:
            raise ValueError(f"{folder} contains no {', '.join(IMAGE_SUFFIXES)} file.")
        self.shape = read_image(self.paths[0]).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = read_image(self.paths[index])
        if image.shape != self.shape:
            raise ValueError(
                f"{self.paths[index]} is {tuple(image.shape)} (C, H, W), but {self.paths[0].name} "
                f"is {tuple(self.shape)}; images that are scored together must have the same shape."
            )
        return image


def open_images(path: str | Path) -> Dataset[Any]:
    """Open a folder of PNG and JPEG files, or an .npz file with a uint8 array (N, H, W, C).

    The name of the array must be `arr_0`, as in the samples and reference images that
    guided-diffusion publishes.

    Raises:
        ValueError: if `path` is neither a folder nor an .npz file, or if its content is not
            supported.
    """
    path = Path(path)
    if path.is_dir():
        return FolderImages(path)
    if path.suffix != ".npz" or not path.exists():
        raise ValueError(f"{path} is neither a folder of images nor an .npz file of images.")
    with checked_read(path, ".npz file") as file, np.load(file, allow_pickle=False) as arrays:
        images = arrays.get("arr_0")
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or not len(images):
        content = "none" if images is None else f"{images.dtype} {images.shape}"
        raise ValueError(
            f"{path} must contain an array arr_0, uint8 (N, H, W, C) with N >= 1, got {content}."
        )
    return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2))


@dataclass(frozen=True)
class ImageSet:
    """A named set of images: samples to score, or reference images.

    Example:
        >>> images = as_image_set(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "zeros")
        >>> [(len(batch), labels) for batch, labels in images.batches(batch_size=3)]
        [(3, [-1, -1, -1]), (1, [-1])]
    """

    name: str  # split or path of the images
    dataset: Dataset[Any]  # map-style; its batches contain images, and optionally labels
    collate: Callable[[list[Any]], Any] | None = None  # collate_fn of the DataLoader
    num_workers: int = 0  # number of workers of the DataLoader
    cached_fingerprint: Callable[[], str] | None = None  # for `fingerprint`, without reading images
    key: BatchKey = None  # where the images of a batch are

    def __len__(self) -> int:
        if not hasattr(self.dataset, "__len__"):
            raise TypeError(
                f"{self.name}: {type(self.dataset).__name__} has no length; use a folder or an "
                ".npz file of images as the reference instead."
            )
        return len(self.dataset)

    def batches(
        self, batch_size: int, index: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield batches of images uint8 (N, C, H, W) and their N labels.

        If a batch is a tuple or list, the labels are its second item. If a batch is a dictionary,
        the labels are under the first key in `LABEL_KEYS` that exists. All labels are -1 if no such
        entry exists, or if the entry is not an integer tensor (N,).

        Args:
            batch_size: maximum number of images in a batch.
            index: indices of the images, in the order in which to yield them; None for all images.
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

    @property
    def fingerprint(self) -> str:
        """Hash of all pixels, 16 hex digits."""
        return self._fingerprints[0]

    @property
    def label_fingerprint(self) -> str:
        """Hash of all labels, 16 hex digits; "" if `cached_fingerprint` covers the labels."""
        return self._fingerprints[1]

    @cached_property
    def _fingerprints(self) -> tuple[str, str]:
        if self.cached_fingerprint is not None:
            return self.cached_fingerprint(), ""
        pixels, classes = hashlib.sha256(), hashlib.sha256()
        for images, labels in self.batches(256):
            pixels.update(images.contiguous().numpy().tobytes())
            classes.update(repr(labels).encode())
        pixels.update(repr(tuple(images.shape[1:])).encode())
        return pixels.hexdigest()[:16], classes.hexdigest()[:16]


def as_image_set(source: ImageSet | Tensor | str | Path, name: str) -> ImageSet:
    """Convert a uint8 tensor (N, C, H, W), or the path of a folder or .npz file, to an `ImageSet`.

    `name` is the name of the image set if the source is a tensor.
    """
    if isinstance(source, ImageSet):
        return source
    if isinstance(source, Tensor):
        return ImageSet(name, TensorDataset(source))
    return ImageSet(str(source), open_images(source))


def evenly_spaced(size: int, num: int) -> list[int]:
    """List `num` evenly spaced indices from 0, ..., size - 1, or all of them if `num` >= `size`.

    Evenly spaced images represent all classes, even if the data are sorted by class.

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
        """Hash of the images and labels of a split."""


def open_split(data: HasSplits, name: str) -> ImageSet:
    """Open the images of a split of a data module.

    Args:
        data: the data module.
        name: "train", "val" or "test". "test" means the split that is named by the data module's
            attribute `tests_on`, or the validation split if there is no such attribute.
    """
    split = getattr(data, "tests_on", "val") if name == "test" else name
    loader, fingerprint = data.in_order(split), partial(data.fingerprint, split)
    key = _refuse_latents if hasattr(data, "vae_sha256") else None
    return ImageSet(split, loader.dataset, loader.collate_fn, loader.num_workers, fingerprint, key)


def _refuse_latents(batch: object) -> Tensor:
    raise TypeError("the data are latents, and samples can be compared only with images.")
