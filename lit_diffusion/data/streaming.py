"""Sets of pictures that fit no disk: read where they lie, in the chunks that litdata writes.

litdata resumes its own loader by the numbers of workers, ranks and samples of the run before, and a
Trainer does not ask it to. Here it only reads: picture n of the set, by two range requests to a
bucket, or from a mapped file of a mounted folder. Which pictures are read is a function of
(seed, epoch), as of all data here, so a resume is as exact.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.data.base import Split, require_at_least, rows_of
from lit_diffusion.data.folder_scan import Requirements
from lit_diffusion.data.pictures import CroppedPictures, Pictures
from lit_diffusion.files import open_image, user_cache

AT_ONCE = 8
"""Pictures of a batch that are fetched from a bucket at the same time, by each worker."""
BUCKETS = ("s3://", "gs://")
"""Of what litdata reads single samples; of other addresses it copies chunks to the disk."""
INDEX = "index.json"
PLAIN_FORMATS = re.compile(
    r"bool|int|float|str|text|json|bytes|pil|jpeg|jpeg_array|numpy|tensor"
    r"|no_header_(numpy|tensor):\d+|(image|file)(:(bmp|gif|jpeg|jpg|pgm|png|ppm|tif|tiff|webp)?)?"
)
"""Formats of litdata whose values are plain data. Others are unpickled, "graph" and "x:pickle" too,
or handed to libraries that are not needed for pictures."""
PLAIN_TYPES = (None, "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict")
"""What samples may be built of; None is a value. Of "collections.defaultdict" litdata imports the
module that the index names."""


class Chunks(NamedTuple):
    """A set: litdata's reader of it, bytes of each file, number of samples, digest of the index."""

    reader: Any
    sizes: dict[str, int]
    num: int
    stamp: str

    def sample(self, place: int, where: str) -> Any:
        """A sample; OSError if it cannot be read."""
        try:
            return self.reader[place]
        except Exception as error:  # whatever litdata and the clients of stores raise
            raise OSError(f"{where} cannot be read ({error!r}).") from error


@dataclass(frozen=True)
class Fields:
    """What samples, which are dictionaries, call their picture and label.

    Labels are in [0, num_classes), and not read without `num_classes`.
    """

    image: str
    label: str
    num_classes: int | None

    def of(self, sample: Any, where: str) -> tuple[Any, int]:
        """Picture, as it was written, and label; -1 without."""
        wanted = [self.image, self.label][: 1 if self.num_classes is None else 2]
        known = list(sample) if isinstance(sample, dict) else []
        if lacking := [name for name in wanted if name not in known]:
            raise ValueError(
                f"{where} has no {lacking[0]!r}, but {known or type(sample).__name__}: samples must"
                " be dictionaries; name their keys by `image` and `label`."
            )
        label = -1 if self.num_classes is None else sample[self.label]
        if self.num_classes is not None and label not in range(self.num_classes):
            raise ValueError(
                f"{where} has the label {label!r}, and labels must be integers in "
                f"[0, {self.num_classes}), num_classes."
            )
        return _own(sample[self.image]), int(label)


def _own(image: Any) -> Any:
    """A copy of what may be part of a mapped file, which may be closed before it is decoded."""
    if isinstance(image, Tensor):
        return image.clone()
    return bytes(image) if isinstance(image, memoryview) else image


@dataclass(frozen=True, eq=False)
class StreamedPictures(CroppedPictures):
    """Pictures of the set at `url`: those of `rows` (N,) int64, or all `num`."""

    url: str
    num: int
    rows: Tensor | None
    fields: Fields
    requirements: Requirements

    def __len__(self) -> int:
        return self.num if self.rows is None else len(self.rows)

    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Pictures `index` of the split, and their labels."""
        places = list(index) if self.rows is None else self.rows[torch.tensor(index)].tolist()
        take = partial(self._take, opened(self.url, os.getpid()))
        if self.url.startswith(BUCKETS):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(take, places))
        else:
            found = list(map(take, places))
        pictures = (
            self._decode(image, place) for place, (image, _) in zip(places, found, strict=True)
        )
        return pictures, torch.tensor([label for _, label in found])

    def _take(self, chunks: Chunks, place: int) -> tuple[Any, int]:
        return self.fields.of(chunks.sample(place, self._named(place)), self._named(place))

    def _decode(self, image: Any, place: int) -> Image.Image:
        try:
            picture = open_image(BytesIO(image)) if isinstance(image, bytes) else image
            picture = to_pil_image(picture) if isinstance(picture, Tensor) else picture
            fault = self.requirements.misfit(picture.mode, min(picture.size))
            converted: Image.Image = picture.convert(self.mode)
        except Exception as error:  # Pillow's decoders raise anything on broken data
            raise OSError(f"{self._named(place)} cannot be read ({error}).") from error
        if fault is not None:
            raise ValueError(
                f"{self._named(place)} {fault}: choose channels and image_size to fit, or convert"
                " and enlarge such with strict=False."
            )
        return converted

    def _named(self, place: int) -> str:
        return f"Sample {place} of {self.url}"


class StreamedImages(Pictures):
    """Pictures of one's own in litdata's chunks, in a bucket or a mounted folder.

    Of a bucket only the index comes to the disk. Each picture costs two requests, so their rate
    grows with `num_workers`, of which there may be more than cores. The first picture of each set
    is looked at before all else, others when their turn comes.

    Args:
        train: s3://BUCKET/PATH or gs://BUCKET/PATH of the training set, or a folder. Samples are
            dictionaries of a picture (the bytes of an image file, a Pillow image or a tensor
            (C, H, W) uint8) and perhaps a label.
        val: where the held-out set is; or how many of `train` to hold out: those whose places n
            have the least `fold("held out", n)`, for which all places are looked at.
        image_size: pixels on each side of a crop, >= 1.
        num_classes: labels are integers in [0, num_classes); None reads none.
        image: key of the picture in a sample.
        label: key of the label.
        strict: whether pictures of another mode, or smaller than `image_size`, are refused;
            otherwise they are converted and enlarged.
        **pictures: as in `Pictures`: channels, flip, random_crop, and its `loader` too.

    Raises:
        FileNotFoundError: If a folder holds no set, or chunks are missing or cut.
        ModuleNotFoundError: If litdata is not installed.
        ValueError: If a set has other keys or pictures, is compressed, or is no plain data.
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
        **pictures: Any,
    ) -> None:
        super().__init__(image_size, **pictures)
        require_at_least(1, num_classes=1 if num_classes is None else num_classes)
        if isinstance(val, int):
            require_at_least(1, val=val)
        self.train = _address(train)
        self.val = val if isinstance(val, int) else _address(val)
        self.fields = Fields(image, label, num_classes)
        self.requirements = Requirements(image_size, self.channels, strict, full=True)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Numbers of the labels; empty without."""
        return tuple(map(str, range(self.fields.num_classes or 0)))

    def check(self) -> None:
        """Open the sets and look at a picture of each."""
        for split in ("train", "val"):
            _require_whole(self._url(split), opened(self._url(split), os.getpid()).sizes)
            self.dataset(split)[0]

    def load(self, split: Split) -> StreamedPictures:
        """Open a split."""
        url = self._url(split)
        num = opened(url, os.getpid()).num
        rows = None
        if isinstance(self.val, int):
            rows = rows_of(split, num, self.val, url)
        return StreamedPictures(
            **self.view(),
            url=url,
            num=num,
            rows=rows,
            fields=self.fields,
            requirements=self.requirements,
        )

    def fingerprint(self, split: Split) -> str:
        """16 hex digits that change when the set is written anew, with the split, or the crop."""
        stamp = opened(self._url(split), os.getpid()).stamp
        held_out = (split, self.val) if isinstance(self.val, int) else ()
        parts = (stamp, held_out, self.image_shape, self.fields)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _url(self, split: Split) -> str:
        return self.val if split == "val" and isinstance(self.val, str) else self.train


def _address(url: str) -> str:
    """Of a bucket as it is, of a folder without ~."""
    if url.startswith(BUCKETS):
        return url
    if re.match(r"\w+:", url):
        raise ValueError(
            f"A set must be in a folder or in {' or '.join(BUCKETS)}, got {url}; for other stores "
            "that speak S3, set AWS_ENDPOINT_URL."
        )
    return str(Path(url).expanduser())


@cache
def opened(url: str, process: int) -> Chunks:
    """The set at `url`, for one process: connections and mapped files are not shared."""
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
        danger = danger_of(config["data_format"], json.loads(config["data_spec"])[1], sizes)
    except Exception as error:  # whatever litdata and the clients of stores raise
        raise ValueError(f"{url} cannot be opened as a set of litdata ({error!r}).") from error
    if danger:
        raise ValueError(
            f"{url} has {danger}, which can run code, or read files, of the choice of whoever wrote"
            " it; only plain data is read: write pictures as bytes and labels as int."
        )
    if config["compression"] or config["encryption"]:
        raise ValueError(
            f"{url} is compressed or encrypted, so litdata reads no single samples of it: write it "
            "without; image files are compressed already."
        )
    chunks = Chunks(reader, sizes, num, hashlib.sha256(text.encode()).hexdigest())
    chunks.sample(0, f"Sample 0 of {url}")  # connects, before threads would at the same time
    return chunks


def danger_of(formats: list[str], spec: dict[str, Any], filenames: Iterable[str]) -> str | None:
    """What in the index of a set makes it unsafe to read a sample; None for plain data."""
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


def _require_whole(url: str, sizes: dict[str, int]) -> None:
    """Raise FileNotFoundError if a folder lacks chunks or parts: litdata would wait for them."""
    if url.startswith(BUCKETS):
        return
    there = {entry.name: entry.stat().st_size for entry in os.scandir(url)}
    lacking = [name for name, size in sizes.items() if there.get(name, 0) < size]
    if lacking:
        raise FileNotFoundError(
            f"{url} lacks {len(lacking)} of {len(sizes)} chunks, or parts of these, such as "
            f"{lacking[0]}: write or copy the set again."
        )
