"""Latents that `lit-diffusion encode` has written: one safetensors file a shard, and an index.

A shard holds `moments` (n, 2C, h, w) float16, mean and logvar of each image's posterior as the VAE
gives them, `labels` (n,) int64, and in its header a digest of what it was made of. Float16 halves
the files and moves no pixel by more than its rounding to 8 bits does; neither scale nor shift is
applied, so both remain the codec's.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.data.base import ImageDataModule, Split, require_at_least, rows_of
from lit_diffusion.data.datasets import Batch, ImageDataset, mirror
from lit_diffusion.files import atomic_write

INDEX = "index.json"


@dataclass(frozen=True)
class LatentIndex:
    """What a folder of latents holds when it is finished; each shard is a file of its own.

    Args:
        num: images.
        image_shape: (C, H, W) of each, in pixels.
        classes: names of the labels.
        shard_size: images of a shard; the last has the rest.
        vae: name of the folder that encoded them.
        vae_sha256: of its weights.
        images: fingerprint of the folder of images.
        flips: whether there is a second set of shards, of the mirrored images.
    """

    num: int
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    shard_size: int
    vae: str
    vae_sha256: str
    images: str
    flips: bool

    @classmethod
    def read(cls, folder: Path) -> "LatentIndex":
        """That of a folder."""
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder.absolute()} holds no {INDEX}: write latents there with `lit-diffusion "
                f"encode --out {folder}`."
            )
        try:
            found = json.loads(path.read_text())
            lists = {name: tuple(found[name]) for name in ("image_shape", "classes")}
            return cls(**{**found, **lists})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no index of latents ({error}).") from error

    def write(self, folder: Path) -> None:
        """In place of one that is there."""
        with atomic_write(folder / INDEX, shared=True) as file:  # all processes write the same
            file.write(f"{json.dumps(asdict(self), indent=1)}\n".encode())

    @property
    def starts(self) -> range:
        """First image of each shard."""
        return range(0, self.num, self.shard_size)

    def shards(self) -> list[tuple[str, range, bool]]:
        """Name of each file, its images, and whether they are mirrored."""
        return [
            (f"{kind}-{number:05d}.safetensors", range(self.num)[start:][: self.shard_size], flip)
            for kind, flip in [("latents", False), ("flipped", True)][: 1 + self.flips]
            for number, start in enumerate(self.starts)
        ]

    def lacking(self, folder: Path) -> list[tuple[str, range, bool]]:
        """Those of `shards` that are not in a folder whole, or are of other images or VAEs."""
        return [shard for shard in self.shards() if not self._holds(folder / shard[0])]

    def write_shard(self, path: Path, moments: Tensor, labels: Tensor) -> None:
        """Write a shard whole or not at all.

        Raises:
            ValueError: for moments that are not finite, as a damaged VAE gives them.
        """
        halved = moments.half().contiguous()
        if not halved.isfinite().all():
            raise ValueError(
                f"{path.name} must hold finite numbers below 65504, and the VAE {self.vae} gives "
                "others; name one whose weights are whole."
            )
        with atomic_write(path) as file:
            file.write(save({"moments": halved, "labels": labels}, {"of": self._stamp(path.name)}))

    def _holds(self, path: Path) -> bool:
        try:
            with safe_open(path, "pt") as shard:
                return (shard.metadata() or {}).get("of") == self._stamp(path.name)
        except (OSError, SafetensorError):
            return False

    def _stamp(self, name: str) -> str:
        """Of what a shard's content follows from."""
        parts = (self.images, self.image_shape, self.vae_sha256, self.shard_size, name)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def _mapped(path: str) -> Any:
    """The moments of a shard, of which a row is read when it is asked for."""
    shard: Any = safe_open(path, "pt")
    return shard.get_slice("moments")


@dataclass(frozen=True, eq=False)
class ShardedLatents(ImageDataset):
    """Moments (B, 2C, h, w) float16 in place of images: those of the images `rows` (N,).

    With flips and a seed, half of them, chosen anew every epoch, are of mirrored images.
    """

    folder: Path
    index: LatentIndex
    rows: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Latents `index` of the split as they look in `epochs`."""
        chosen = torch.tensor(index, dtype=torch.int64)
        found = [self._row(*key) for key in zip(epochs, index, strict=True)]
        return torch.stack(found), self.labels[chosen], chosen

    def _row(self, epoch: int, index: int) -> Tensor:
        shard, row = divmod(int(self.rows[index]), self.index.shard_size)
        flips = self.index.flips and self.seed is not None and mirror(self.seed, epoch, index)
        kind = "flipped" if flips else "latents"
        row_of: Tensor = _mapped(f"{self.folder / kind}-{shard:05d}.safetensors")[row]
        return row_of


class Latents(ImageDataModule):
    """Latents of a folder of images, as `lit-diffusion encode` writes them, for a `VAECodec`.

    Files are mapped into memory and read row by row. Half of the training images, chosen anew every
    epoch, are mirrored where the folder has flips.

    Args:
        train: folder of latents.
        val: folder of held-out latents, by the same VAE; or how many of `train` to hold out: those
            whose places n have the least `fold("held out", n)`.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: If a folder has no index.
        ValueError: If shards are missing, or the two folders do not fit together.
    """

    def __init__(self, train: str, val: int | str, **loader: Any) -> None:
        super().__init__(**loader)
        if isinstance(val, int):
            require_at_least(1, val=val)
        self.train = Path(train).expanduser()
        self.val = val if isinstance(val, int) else Path(val).expanduser()

    @cached_property
    def _indices(self) -> dict[Path, LatentIndex]:
        folders = {self.train, self._folder("val")}
        return {folder: LatentIndex.read(folder) for folder in folders}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images, in pixels."""
        return self._indices[self.train].image_shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each label; empty without labels."""
        return self._indices[self.train].classes

    @property
    def vae_sha256(self) -> str:
        """Of the weights that encoded them; a module's codec must have the same."""
        return self._indices[self.train].vae_sha256

    def check(self) -> None:
        """Name the shards that are missing."""
        for folder, index in self._indices.items():
            if lacking := index.lacking(folder):
                raise ValueError(
                    f"{folder} lacks {len(lacking)} of {len(index.shards())} shards, such as "
                    f"{lacking[0][0]}, or holds those of other latents: the same `lit-diffusion "
                    "encode` again finishes it."
                )
            ours = self._indices[self.train]
            for name in ("image_shape", "vae_sha256", "classes"):
                if (theirs := getattr(index, name)) != getattr(ours, name):
                    raise ValueError(
                        f"{name} is {getattr(ours, name)} in {self.train}, but {theirs} in {folder}"
                        "; encode both alike."
                    )

    def load(self, split: Split) -> ShardedLatents:
        """Open a split, which is checked by now or else here."""
        self.check()
        folder = self._folder(split)
        index = self._indices[folder]
        rows = self._rows(split, index.num)
        found = []
        for name, _, flip in index.shards():
            if not flip:
                with safe_open(folder / name, "pt") as shard:
                    found.append(shard.get_tensor("labels"))
        return ShardedLatents(folder, index, rows, torch.cat(found)[rows])

    def fingerprint(self, split: Split) -> str:
        """16 hex digits that change with the images that were encoded, the VAE, or the split."""
        index = self._indices[self._folder(split)]
        parts = (index.images, index.vae_sha256, split, self.val if split == "train" else "")
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def default_workers(self) -> int:
        """One: rows are copied, and no picture is decoded."""
        return 1

    def _folder(self, split: Split) -> Path:
        return self.val if split == "val" and isinstance(self.val, Path) else self.train

    def _rows(self, split: Split, num: int) -> Tensor:
        if isinstance(self.val, Path):
            return torch.arange(num)
        return rows_of(split, num, self.val, self.train)
