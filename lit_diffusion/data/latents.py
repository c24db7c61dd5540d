"""Read and write folders of latents: shards, which are safetensors files, and an index.

A shard holds two tensors: `moments` has shape (n, 2C, h, w) in float16, and `labels` has shape (n,)
in int64. The moments are the mean and log-variance of each image's VAE posterior, before the
latents are scaled. The header of a shard holds a digest of the images, the VAE and the settings.
Storing the moments in float16 changes the decoded pixels less than rounding to 8 bits does.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.data.base import ImageDataModule, Split, split_rows
from lit_diffusion.data.datasets import Batch, ImageDataset, is_mirrored
from lit_diffusion.files import atomic_write, atomic_write_text, check_regular, checked_read

INDEX = "index.json"
MAX_SHARDS = 10**6
"""Maximum number of shards. Listing more would take minutes."""


@dataclass(frozen=True)
class LatentIndex:
    """Content of index.json: what a folder of latents contains when all shards are written.

    Attributes:
        num: number of images.
        image_shape: (C, H, W) of each image, in pixels.
        classes: name of each label.
        shard_size: number of images in each shard. The last shard has the remaining images.
        vae: name of the VAE's folder.
        vae_sha256: SHA-256 of the VAE's weights.
        images: fingerprint of the folder of images (`ImageFolder.fingerprint`).
        flips: whether there are also shards with latents of the mirrored images.
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
        """Read the index of a folder.

        Raises:
            FileNotFoundError: if there is no index.
            ValueError: if the file is not an index, or if a value has a wrong type or is out of
                range.
        """
        path = folder / INDEX
        if not path.exists():
            raise FileNotFoundError(
                f"{folder.absolute()} holds no {INDEX}: write latents there with `lit-diffusion "
                f"encode --out {folder}`."
            )
        with checked_read(path, "index of latents") as file:
            fields = json.loads(file.read_text())
            tuples = {name: tuple(fields[name]) for name in ("image_shape", "classes")}
            index = cls(**{**fields, **tuples})
            counts = (index.num, index.shard_size, *index.image_shape)
            texts = (index.vae, index.vae_sha256, index.images, *index.classes)
            is_valid = all(type(count) is int and count >= 1 for count in counts)
            is_valid &= all(isinstance(text, str) for text in texts)
            if not is_valid or len(counts) != 5 or not isinstance(index.flips, bool):
                raise ValueError("it has values of other types")
            if index.num > MAX_SHARDS * index.shard_size:
                raise ValueError(f"it has more than {MAX_SHARDS:,} shards")
            return index

    def write(self, folder: Path) -> None:
        """Write or replace the index. Several processes may write the same index at once."""
        atomic_write_text(folder / INDEX, f"{json.dumps(asdict(self), indent=1)}\n", shared=True)

    def shards(self) -> list[tuple[str, range, bool]]:
        """List each shard as (file name, indices of its images, whether they are mirrored)."""
        return [
            (f"{kind}-{number:05d}.safetensors", range(self.num)[start:][: self.shard_size], flip)
            for kind, flip in [("latents", False), ("flipped", True)][: 1 + self.flips]
            for number, start in enumerate(range(0, self.num, self.shard_size))
        ]

    def missing_shards(self, folder: Path) -> list[tuple[str, range, bool]]:
        """List shards that are missing or truncated, or that do not match the images or the VAE."""
        missing = []
        for shard in self.shards():
            path, digest = folder / shard[0], None
            with suppress(OSError, SafetensorError), safe_open(check_regular(path), "pt") as file:
                digest = (file.metadata() or {}).get("of")
            if digest != self._digest(shard[0]):
                missing.append(shard)
        return missing

    def write_shard(self, path: Path, moments: Tensor, labels: Tensor) -> None:
        """Write a shard of moments (n, 2C, h, w) and labels (n,), atomically.

        Raises:
            ValueError: if a moment is not finite in float16, for example because weights of the VAE
                are damaged.
        """
        half = moments.half().contiguous()
        if not half.isfinite().all():
            raise ValueError(
                f"{path.name} must hold finite numbers below 65504, but the VAE {self.vae} returns "
                "others; use a VAE with intact weights."
            )
        with atomic_write(path) as file:
            file.write(save({"moments": half, "labels": labels}, {"of": self._digest(path.name)}))

    def _digest(self, name: str) -> str:
        """Digest of everything that the content of a shard depends on."""
        parts = (self.images, self.image_shape, self.vae_sha256, self.shard_size, name)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def _map_moments(path: str) -> Any:
    """Memory-mapped moments of a shard. A row is read when it is indexed."""
    shard: Any = safe_open(check_regular(path), "pt")
    return shard.get_slice("moments")


@dataclass(frozen=True, eq=False)
class ShardedLatents(ImageDataset):
    """Dataset of moments (B, 2C, h, w) float16 in place of images.

    If the folder has latents of mirrored images and `seed` is set, each image is mirrored with
    probability 1/2, independently in each epoch.
    """

    folder: Path
    index: LatentIndex
    rows: Tensor  # (N,) int64 indices of the split's images in the folder
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Load latent `index[i]` with the augmentation of epoch `epochs[i]`, for each i."""
        positions = torch.tensor(index, dtype=torch.int64)
        moments = []
        for epoch, i in zip(epochs, index, strict=True):
            shard, row = divmod(int(self.rows[i]), self.index.shard_size)
            mirrored = self.seed is not None and is_mirrored(self.seed, epoch, i)
            kind = "flipped" if mirrored and self.index.flips else "latents"
            moments.append(_map_moments(f"{self.folder / kind}-{shard:05d}.safetensors")[row])
        return torch.stack(moments), self.labels[positions], positions


class Latents(ImageDataModule):
    """Latents of images, written by `lit-diffusion encode`, for a module with a `VAECodec`.

    If the folder has latents of mirrored images (`encode --flips`), each training image is mirrored
    with probability 1/2, independently in each epoch.

    Args:
        train: folder of latents.
        val: folder of held-out latents from the same VAE; or the number of images in `train` to
            hold out. In the latter case, the images with the smallest hashes
            `fold("held out", index)` are held out.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if a folder has no index.
        ValueError: if shards are missing, or if the folders differ in image shape, VAE or classes.

    Example:
        >>> data = Latents("latents/train", val=1000, batch_size=64)
        >>> data.image_shape  # doctest: +SKIP
        (3, 256, 256)
    """

    def __init__(self, train: str, val: int | str, **loader: Any) -> None:
        super().__init__(**loader)
        self.train = Path(train).expanduser()
        self.val = val if isinstance(val, int) else Path(val).expanduser()

    @cached_property
    def _indices(self) -> dict[Path, LatentIndex]:
        return {folder: LatentIndex.read(folder) for folder in {self.train, self._folder("val")}}

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
        """SHA-256 of the VAE weights, which must equal the SHA-256 in the module's codec."""
        return self._indices[self.train].vae_sha256

    def check(self) -> None:
        """Raise an error if shards are missing or the folders do not match."""
        train = self._indices[self.train]
        for folder, index in self._indices.items():
            if missing := index.missing_shards(folder):
                raise ValueError(
                    f"{folder} lacks {len(missing)} of {len(index.shards())} shards, such as "
                    f"{missing[0][0]}, or has shards of other latents: run the same `lit-diffusion "
                    "encode` again to finish it."
                )
            for name in ("image_shape", "vae_sha256", "classes"):
                if getattr(index, name) != getattr(train, name):
                    raise ValueError(
                        f"{name} is {getattr(train, name)} in {self.train}, but "
                        f"{getattr(index, name)} in {folder}; encode both alike."
                    )

    def load(self, split: Split) -> ShardedLatents:
        """Open a split, without augmentation. Checks the folders first."""
        self.check()
        folder = self._folder(split)
        index = self._indices[folder]
        labels = []
        for name, _, flip in index.shards():
            if not flip:
                with safe_open(check_regular(folder / name), "pt") as shard:
                    labels.append(shard.get_tensor("labels"))
        if (num := sum(map(len, labels))) != index.num:  # before a list of `index.num` is made
            raise ValueError(
                f"{folder} holds {num} latents, but {INDEX} there says {index.num}: encode the "
                "images again, into a new folder."
            )
        if isinstance(self.val, Path):
            rows = torch.arange(index.num)
        else:
            rows = split_rows(split, range(index.num), self.val, self.train)
        return ShardedLatents(folder, index, rows, torch.cat(labels)[rows])

    def fingerprint(self, split: Split) -> str:
        """Hash of the encoded images, the VAE and the split, as 16 hex digits."""
        index = self._indices[self._folder(split)]
        held_out = (split, self.val) if isinstance(self.val, int) else ()
        parts = (index.images, index.vae_sha256, held_out)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def default_workers(self) -> int:
        """Return 1, because workers only copy rows, and decode no image."""
        return 1

    def _folder(self, split: Split) -> Path:
        return self.val if split == "val" and isinstance(self.val, Path) else self.train
