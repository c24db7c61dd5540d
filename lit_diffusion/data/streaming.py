"""Stream image sets that do not fit on the local disk, from litdata chunks in a bucket or folder.

This module uses only litdata's reader of single samples. For each sample, the reader makes two HTTP
range requests to a bucket, or reads a memory-mapped file in a folder. litdata's own loader is not
used, because it can resume only with the same number of workers and ranks.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.data.base import Split, require_at_least, split_rows
from lit_diffusion.data.cropped_images import CroppedImageDataModule, CroppedImages, Requirements
from lit_diffusion.files import check_regular, open_image, user_cache

MAX_REQUESTS = 8
"""Number of images that a worker requests from a bucket at the same time."""
BUCKETS = ("s3://", "gs://")
"""URL schemes from which litdata reads single samples; from others it downloads whole chunks."""
INDEX = "index.json"
PLAIN_FORMATS = re.compile(
    r"bool|int|float|str|text|json|bytes|pil|jpeg|jpeg_array|numpy|tensor"
    r"|no_header_(numpy|tensor):\d+|(image|file)(:(bmp|gif|jpeg|jpg|pgm|png|ppm|tif|tiff|webp)?)?"
)
"""litdata formats whose values are plain data. Others are unpickled (including "graph" and
"x:pickle"), or passed to libraries that images do not need."""
PLAIN_TYPES = (None, "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict")
"""Container types allowed in samples; None marks a value. "collections.defaultdict" is excluded,
because litdata would import a module that the index names."""


class ChunkedSet(NamedTuple):
    """An open litdata dataset."""

    reader: Any  # litdata.StreamingDataset
    sizes: dict[str, int]  # bytes of each chunk file
    num: int  # number of samples
    stamp: str  # digest of the index

    def read_sample(self, place: int, name: str) -> Any:
        """Read sample number `place`. Raises an OSError that mentions `name`."""
        try:
            return self.reader[place]
        except Exception as error:  # litdata and the clients of stores raise anything
            raise OSError(f"{name} cannot be read ({error!r}).") from error


@dataclass(frozen=True)
class Fields:
    """Keys of the image and the label in a sample. The dataset's fingerprint includes them."""

    image: str
    label: str
    num_classes: int | None  # labels are in [0, num_classes); None ignores labels

    def extract(self, sample: Any, name: str) -> tuple[Any, int]:
        """Return the undecoded image of a sample, and its label (-1 if labels are ignored).

        Raises:
            ValueError: if a key is missing or the label is out of range. The message contains
                `name`, the name of the sample.
        """
        keys = list(sample) if isinstance(sample, dict) else []
        for key in (self.image,) if self.num_classes is None else (self.image, self.label):
            if key not in keys:
                raise ValueError(
                    f"{name} has no {key!r}, but {keys or type(sample).__name__}: samples must be "
                    "dictionaries; pass their keys as `image` and `label`."
                )
        label = -1 if self.num_classes is None else sample[self.label]
        if self.num_classes is not None and label not in range(self.num_classes):
            raise ValueError(
                f"{name} has the label {label!r}, but labels must be integers in "
                f"[0, {self.num_classes}), because num_classes={self.num_classes}."
            )
        image = sample[self.image]
        # A copy, because a memory-mapped file may be closed before its image is decoded.
        if isinstance(image, Tensor):
            image = image.clone()
        elif isinstance(image, memoryview):
            image = bytes(image)
        return image, int(label)


@dataclass(frozen=True, eq=False)
class StreamedDataset(CroppedImages):
    """Crops of the images of a litdata dataset."""

    url: str
    rows: Tensor  # (N,) int64 sample numbers of the split
    fields: Fields
    requirements: Requirements

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Return the images at `index` of the split, decoded lazily, and their labels (B,)."""
        sample_numbers = self.rows[torch.tensor(index)].tolist()
        names = [f"Sample {number} of {self.url}" for number in sample_numbers]
        chunked_set = open_set(self.url, os.getpid())

        def fetch_sample(number: int, name: str) -> tuple[Any, int]:
            return self.fields.extract(chunked_set.read_sample(number, name), name)

        with ThreadPoolExecutor(MAX_REQUESTS if self.url.startswith(BUCKETS) else 1) as pool:
            images, labels = zip(*pool.map(fetch_sample, sample_numbers, names), strict=True)
        return map(self._decode, images, names), torch.tensor(labels)

    def _decode(self, image: Any, name: str) -> Image.Image:
        try:
            if isinstance(image, Tensor) and image.dtype != torch.uint8:
                raise TypeError(f"a tensor must be uint8, got {image.dtype}")
            decoded = open_image(BytesIO(image)) if isinstance(image, bytes) else image
            decoded = to_pil_image(decoded) if isinstance(decoded, Tensor) else decoded
            fault = self.requirements.find_mismatch(decoded.mode, decoded.size)
            converted = decoded.convert(self.mode)
        except Exception as error:  # Pillow's decoders raise anything on broken data
            raise OSError(f"{name} cannot be read ({error}).") from error
        if fault is not None:
            raise ValueError(
                f"{name} {fault}: --data.init_args.strict=false converts colors and enlarges "
                "small images; or choose channels and image_size to fit them."
            )
        return converted


class StreamedImages(CroppedImageDataModule):
    """Your own images in litdata's chunks, in a bucket or a mounted folder.

    If the set is in a bucket, only the index is stored on the disk, and each image takes two
    requests. Therefore, throughput grows with `num_workers`, even beyond the number of cores. At
    the start, only the first image of each set is checked. The others are checked when they are
    read.

    Args:
        train: s3://BUCKET/PATH or gs://BUCKET/PATH of the training set, or a folder. Samples are
            dictionaries with an image and optionally a label. An image is the bytes of an image
            file, a Pillow image, or a uint8 tensor (C, H, W).
        val: URL or folder of the held-out set; or the number of samples in `train` to hold out. In
            the latter case, the samples with the smallest hashes `fold("held out", index)` are held
            out.
        image_size: pixels on each side of a crop, >= 1.
        num_classes: number of classes. Labels are integers in [0, num_classes). None ignores
            labels.
        image: key of the image in a sample.
        label: key of the label in a sample.
        strict: whether to raise an error if an image is smaller than `image_size` or its mode does
            not fit `channels`. If False, such images are enlarged and converted.
        **options: options of `CroppedImageDataModule`: channels, flip, random_crop; batch_size,
            num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if a folder has no index of litdata, or if chunks are missing or
            truncated.
        ModuleNotFoundError: if litdata is not installed.
        ValueError: if a sample has no `image` or no `label`, if an image or a label is unsuitable,
            if a set is compressed, or if reading a set could run code.

    Example:
        >>> data = StreamedImages("s3://bucket/train", val=1000, image_size=64, num_workers=32)
        >>> data.image_shape
        (3, 64, 64)
    """

    def __init__(
        self,
        train: str,
        val: int | str,
        image_size: int,
        num_classes: int | None = None,
        image: str = "image",
        label: str = "label",
        strict: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(image_size, **options)
        require_at_least(1, num_classes=1 if num_classes is None else num_classes)
        self.train = _normalize_url(train)
        self.val = val if isinstance(val, int) else _normalize_url(val)
        self.fields = Fields(image, label, num_classes)
        self.requirements = Requirements(image_size, self.channels, strict, full=True)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels "0", "1", ...; empty without labels."""
        return tuple(map(str, range(self.fields.num_classes or 0)))

    def check(self) -> None:
        """Open the sets, and read the first image of each set."""
        for split in ("train", "val"):
            url = self._url(split)
            sizes = open_set(url, os.getpid()).sizes
            if not url.startswith(BUCKETS):  # litdata would wait for missing files
                actual = {entry.name: entry.stat().st_size for entry in os.scandir(url)}
                missing = [name for name, size in sizes.items() if actual.get(name, 0) < size]
                if missing:
                    raise FileNotFoundError(
                        f"{url} lacks {len(missing)} of {len(sizes)} chunks, or parts of these, "
                        f"such as {missing[0]}: write or copy the set again."
                    )
            self.dataset(split)[0]

    def load(self, split: Split) -> StreamedDataset:
        """Open a split, without augmentation."""
        url = self._url(split)
        num = open_set(url, os.getpid()).num
        if isinstance(self.val, int):
            rows = split_rows(split, range(num), self.val, url)
        else:
            rows = torch.arange(num)
        return StreamedDataset(
            **self.crop_options(),
            url=url,
            rows=rows,
            fields=self.fields,
            requirements=self.requirements,
        )

    def fingerprint(self, split: Split) -> str:
        """Hash of the set's index, the split and the image shape, as 16 hex digits."""
        stamp = open_set(self._url(split), os.getpid()).stamp
        held_out = (split, self.val) if isinstance(self.val, int) else ()
        parts = (stamp, held_out, self.image_shape, self.fields)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _url(self, split: Split) -> str:
        return self.val if split == "val" and isinstance(self.val, str) else self.train


def _normalize_url(url: str) -> str:
    """Return the URL of a bucket unchanged, or a folder with ~ expanded."""
    if url.startswith(BUCKETS):
        return url
    if re.match(r"\w+:", url):
        raise ValueError(
            f"A set must be in a folder or in {' or '.join(BUCKETS)}, got {url}; for other stores "
            "that speak S3, set AWS_ENDPOINT_URL."
        )
    return str(Path(url).expanduser())


@cache
def open_set(url: str, process: int) -> ChunkedSet:
    """Open the set at `url`, once per process.

    Processes cannot share connections and mapped files. The result is therefore cached by `url` and
    `process`, the process id, so a forked process opens the set again.

    Raises:
        FileNotFoundError: if a folder has no index of litdata.
        ModuleNotFoundError: if litdata is not installed.
        OSError: if the first sample cannot be read.
        ValueError: if the set is not a litdata dataset, is compressed, or could run code when it is
            read.
    """
    if find_spec("litdata") is None:
        raise ModuleNotFoundError("StreamedImages needs litdata: pip install -e '.[streaming]'.")
    from litdata import StreamingDataset

    if not url.startswith(BUCKETS) and not (Path(url) / INDEX).is_file():
        raise FileNotFoundError(
            f"{Path(url).absolute()} holds no {INDEX}: write a set there with litdata's `optimize`."
        )
    try:
        reader = StreamingDataset(url, str(user_cache() / "litdata"), batch_decode=0)
        text = check_regular(Path(reader.input_dir.path) / INDEX).read_text()
        index = json.loads(text)
        sizes = {chunk["filename"]: chunk["chunk_bytes"] for chunk in index["chunks"]}
        for chunk in index["chunks"]:  # a chunk has 4 bytes for the place of each sample
            if 4 * chunk["chunk_size"] > chunk["chunk_bytes"]:
                raise ValueError(f"{chunk['filename']} is too small for its samples")
        num = sum(chunk["chunk_size"] for chunk in index["chunks"])
        config = {"compression": None, "encryption": None} | index["config"]
        unsafe = find_unsafe(config["data_format"], json.loads(config["data_spec"])[1], sizes)
    except Exception as error:  # litdata and the clients of stores raise anything
        raise ValueError(f"{url} cannot be opened as a set of litdata ({error!r}).") from error
    if unsafe:
        raise ValueError(
            f"{url} has {unsafe}, which could run any code, or read any files; only plain data is "
            "read: write images as bytes and labels as int."
        )
    if config["compression"] or config["encryption"]:
        raise ValueError(
            f"{url} is compressed or encrypted, so litdata cannot read single samples: write it "
            "without compression, because image files are compressed already."
        )
    for name in sizes:
        if (chunk := Path(url, name)).exists():
            check_regular(chunk)
    chunked_set = ChunkedSet(reader, sizes, num, hashlib.sha256(text.encode()).hexdigest())
    chunked_set.read_sample(0, f"Sample 0 of {url}")  # connects before threads do so concurrently
    return chunked_set


def find_unsafe(
    formats: Sequence[str], spec: dict[str, Any], filenames: Iterable[str]
) -> str | None:
    """Return a phrase that says why reading a set is unsafe; None if its samples are plain data.

    The arguments are entries of the index: the litdata formats of the values in a sample, the tree
    of its containers, and the names of the chunk files.
    """
    for name in formats:
        if not PLAIN_FORMATS.fullmatch(name):
            return f"samples of the format {name!r}"
    specs = [spec]
    for node in specs:
        if node["type"] not in PLAIN_TYPES:
            return f"samples of the type {node['type']!r}"
        specs += node["children_spec"]
    for name in filenames:
        if name in ("", ".", "..") or re.search(r"[/\\]", name):
            return f"a chunk called {name!r}, outside its folder"
    return None
