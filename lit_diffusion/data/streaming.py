"""Sets of images that fit no disk: read from buckets or mounted folders, in litdata's chunks.

litdata only reads single samples here: by two range requests to a bucket, or from a memory-mapped
file of a folder. Its own loader resumes only with the workers and ranks of the run before.
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
from lit_diffusion.data.cropped_images import (
    CroppedImageDataModule,
    CroppedImages,
    Requirements,
)
from lit_diffusion.files import open_image, user_cache

MAX_REQUESTS = 8
"""Images of a batch that each worker fetches from a bucket at the same time."""
BUCKETS = ("s3://", "gs://")
"""Addresses of which litdata reads single samples; of others it copies chunks to the disk."""
INDEX = "index.json"
PLAIN_FORMATS = re.compile(
    r"bool|int|float|str|text|json|bytes|pil|jpeg|jpeg_array|numpy|tensor"
    r"|no_header_(numpy|tensor):\d+|(image|file)(:(bmp|gif|jpeg|jpg|pgm|png|ppm|tif|tiff|webp)?)?"
)
"""Formats of litdata whose values are plain data. Others are unpickled, "graph" and "x:pickle" too,
or passed to libraries that are not needed for images."""
PLAIN_TYPES = (None, "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict")
"""Containers of samples; None is a value. For "collections.defaultdict" litdata imports the module
that the index names."""


class ChunkedSet(NamedTuple):
    """A set of litdata that is open."""

    reader: Any  # litdata's
    sizes: dict[str, int]  # bytes of each file
    num: int  # number of samples
    stamp: str  # digest of the index

    def read_sample(self, place: int, name: str) -> Any:
        """Read a sample; an OSError names it by `name`."""
        try:
            return self.reader[place]
        except Exception as error:  # litdata and the clients of stores raise anything
            raise OSError(f"{name} cannot be read ({error!r}).") from error


@dataclass(frozen=True)
class Fields:
    """Keys of image and label in samples. The repr is part of fingerprints."""

    image: str
    label: str
    num_classes: int | None  # labels are in [0, num_classes); None reads none

    def extract(self, sample: Any, name: str) -> tuple[Any, int]:
        """Image of a sample as it was written, and its label; -1 without labels.

        Raises:
            ValueError: if the sample has other keys or another label; names it by `name`.
        """
        keys = list(sample) if isinstance(sample, dict) else []
        for key in (self.image,) if self.num_classes is None else (self.image, self.label):
            if key not in keys:
                raise ValueError(
                    f"{name} has no {key!r}, but {keys or type(sample).__name__}: samples must be "
                    "dictionaries; name their keys by `image` and `label`."
                )
        label = -1 if self.num_classes is None else sample[self.label]
        if self.num_classes is not None and label not in range(self.num_classes):
            raise ValueError(
                f"{name} has the label {label!r}, and labels must be integers in "
                f"[0, {self.num_classes}), num_classes."
            )
        image = sample[self.image]
        # It may be part of a memory-mapped file that is closed before the image is decoded.
        if isinstance(image, Tensor):
            image = image.clone()
        elif isinstance(image, memoryview):
            image = bytes(image)
        return image, int(label)


@dataclass(frozen=True, eq=False)
class StreamedDataset(CroppedImages):
    """Crops of the images of a set."""

    url: str
    rows: Tensor  # (N,) int64 samples that the split has
    fields: Fields
    requirements: Requirements

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Images `index` of the split, decoded one by one and in `mode`, and labels (B,)."""
        places = self.rows[torch.tensor(index)].tolist()
        names = [f"Sample {place} of {self.url}" for place in places]
        chunks = open_set(self.url, os.getpid())

        def fetch_sample(place: int, name: str) -> tuple[Any, int]:
            return self.fields.extract(chunks.read_sample(place, name), name)

        with ThreadPoolExecutor(MAX_REQUESTS if self.url.startswith(BUCKETS) else 1) as pool:
            images, labels = zip(*pool.map(fetch_sample, places, names), strict=True)
        return map(self._decode, images, names), torch.tensor(labels)

    def _decode(self, image: Any, name: str) -> Image.Image:
        try:
            decoded = open_image(BytesIO(image)) if isinstance(image, bytes) else image
            decoded = to_pil_image(decoded) if isinstance(decoded, Tensor) else decoded
            fault = self.requirements.find_mismatch(decoded.mode, min(decoded.size))
            converted: Image.Image = decoded.convert(self.mode)
        except Exception as error:  # Pillow's decoders raise anything on broken data
            raise OSError(f"{name} cannot be read ({error}).") from error
        if fault is not None:
            raise ValueError(
                f"{name} {fault}: choose channels and image_size to fit, or convert and enlarge "
                "such with strict=False."
            )
        return converted


class StreamedImages(CroppedImageDataModule):
    """Images of one's own in litdata's chunks, in a bucket or a mounted folder.

    Of a bucket only the index comes to the disk. Each image costs two requests, so throughput grows
    with `num_workers`, which may exceed the number of cores. The first image of each set is checked
    before anything else, others when they are read.

    Args:
        train: s3://BUCKET/PATH or gs://BUCKET/PATH of the training set, or a folder. Samples are
            dictionaries of an image (the bytes of an image file, a Pillow image or a tensor
            (C, H, W) uint8) and perhaps a label.
        val: address of the held-out set; or how many of `train` to hold out: those whose places n
            have the least `fold("held out", n)`, which is computed for all places.
        image_size: pixels on each side of a crop, >= 1.
        num_classes: labels are integers in [0, num_classes); None reads none.
        image: key of the image in a sample.
        label: key of the label.
        strict: whether images of another mode, or smaller than `image_size`, are refused; otherwise
            they are converted and enlarged.
        **options: as in `CroppedImageDataModule`: channels, flip, random_crop; batch_size,
            num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: If a folder holds no set, or chunks are missing or cut.
        ModuleNotFoundError: If litdata is not installed.
        ValueError: If a set has other keys or images, is compressed, or is no plain data.
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
        self.train = _address(train)
        self.val = val if isinstance(val, int) else _address(val)
        self.fields = Fields(image, label, num_classes)
        self.requirements = Requirements(image_size, self.channels, strict, full=True)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Numbers of the labels; empty without labels."""
        return tuple(map(str, range(self.fields.num_classes or 0)))

    def check(self) -> None:
        """Open the sets and read the first image of each."""
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
        """16 hex digits that change when the set is written anew, with the split, or the crop."""
        stamp = open_set(self._url(split), os.getpid()).stamp
        held_out = (split, self.val) if isinstance(self.val, int) else ()
        parts = (stamp, held_out, self.image_shape, self.fields)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _url(self, split: Split) -> str:
        return self.val if split == "val" and isinstance(self.val, str) else self.train


def _address(url: str) -> str:
    """The address of a bucket as it is, of a folder without ~."""
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
    """Open the set at `url` for one process, as connections and mapped files are not shared.

    Raises:
        FileNotFoundError: If a folder holds no set.
        ModuleNotFoundError: If litdata is not installed.
        OSError: If its first sample cannot be read.
        ValueError: If it is no set of litdata, is compressed, or is no plain data.
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
        text = (Path(reader.input_dir.path) / INDEX).read_text()
        index = json.loads(text)
        sizes = {chunk["filename"]: chunk["chunk_bytes"] for chunk in index["chunks"]}
        num = sum(chunk["chunk_size"] for chunk in index["chunks"])
        config = {"compression": None, "encryption": None} | index["config"]
        unsafe = find_unsafe(config["data_format"], json.loads(config["data_spec"])[1], sizes)
    except Exception as error:  # litdata and the clients of stores raise anything
        raise ValueError(f"{url} cannot be opened as a set of litdata ({error!r}).") from error
    if unsafe:
        raise ValueError(
            f"{url} has {unsafe}, which can run code, or read files, of the choice of whoever wrote"
            " it; only plain data is read: write images as bytes and labels as int."
        )
    if config["compression"] or config["encryption"]:
        raise ValueError(
            f"{url} is compressed or encrypted, so litdata reads no single samples of it: write it "
            "without; image files are compressed already."
        )
    chunks = ChunkedSet(reader, sizes, num, hashlib.sha256(text.encode()).hexdigest())
    chunks.read_sample(0, f"Sample 0 of {url}")  # connects, before threads do at the same time
    return chunks


def find_unsafe(
    formats: Sequence[str], spec: dict[str, Any], filenames: Iterable[str]
) -> str | None:
    """What in the index of a set makes it unsafe to read a sample; None for plain data.

    The index has the formats of the values in a sample, a tree of its containers (`spec`), and the
    file names of the chunks.
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
