"""Base class of the data modules, whose batches depend only on seed, epoch and image index."""

import hashlib
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from lit_diffusion.data.datasets import Batch, ImageDataset
from lit_diffusion.data.loaders import (
    ResumableLoader,
    ShuffledSampler,
    batches_done_in_epoch,
    even_batch_size,
    rescale_progress,
    usable_cores,
)
from lit_diffusion.seeding import classes_of, fold, run_seed

Split: TypeAlias = Literal["train", "val", "test"]


class ImageDataModule(LightningDataModule):
    """Base class of the data modules. A subclass defines `image_shape`, `class_names` and `load`.

    The order of training images depends only on seed and epoch. An incomplete last batch is
    dropped. A run that is resumed in the middle of an epoch continues there, even with a different
    batch size or number of processes. Validation and testing visit every image once, on any number
    of processes. A prediction batch contains the seeds and the labels of images to generate, as
    two int64 tensors of shape (B,).

    Args:
        batch_size: images per batch and process, >= 1. Validation on several processes may use a
            slightly larger batch size (`even_batch_size`).
        num_workers: DataLoader workers per process. None means 0 for data in memory, 1 for latents,
            and otherwise the number of usable CPU cores per process, at most 16.
        num_predict: number of images to generate in prediction, >= 1. The images have the seeds 0,
            1, and so on. The image of seed s has the label `s % num_classes`, or -1 without
            labels.
        seed: seed of the training order and augmentation. None means the run's seed
            (`seed_everything`), or 0 if there is none. Splits and validation do not depend on
            `seed`.

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> from lit_diffusion.data.datasets import TensorImages
        >>> class Noise(ImageDataModule):
        ...     image_shape, class_names = (3, 8, 8), ()
        ...
        ...     def load(self, split):
        ...         images = torch.randint(256, (100, 3, 8, 8), dtype=torch.uint8)
        ...         return TensorImages(images, labels=torch.full((100,), -1))
        >>> images, labels, index = next(iter(Noise(batch_size=4).val_dataloader()))
        >>> images.shape, labels.tolist()
        (torch.Size([4, 3, 8, 8]), [-1, -1, -1, -1])
    """

    tests_on: Literal["val", "test"] = "val"
    """Split that `test_dataloader` loads, and the prefix of its metrics. Set it to "test" if `load`
    supports a test split."""

    def __init__(
        self,
        batch_size: int = 128,
        num_workers: int | None = None,
        num_predict: int = 64,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, batch_size=batch_size, num_predict=num_predict)
        require_at_least(0, num_workers=num_workers or 0)
        self.save_hyperparameters(logger=False)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.num_predict = num_predict
        self._seed = seed
        self._datasets: dict[Split, ImageDataset] = {}

    @property
    def seed(self) -> int:
        """Seed of the training order and augmentation."""
        return (run_seed() or 0) if self._seed is None else self._seed

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Name of each label; empty without labels."""

    @abstractmethod
    def load(self, split: Split) -> ImageDataset:
        """Open a split, without augmentation."""

    def check(self) -> None:
        """Download or verify the files, and raise an error if that fails.

        This method runs once per node.
        """

    def pending_setup(self) -> str | None:
        """Return text that says what `check` will download or unpack; None if it does neither.

        The text is a clause without a period, such as "FILE will be unpacked".
        """
        return None

    def default_workers(self) -> int:
        """Number of loading processes if `num_workers` is None."""
        return 0

    @property
    def num_classes(self) -> int | None:
        """Number of labels; None without labels."""
        return len(self.class_names) or None

    def dataset(self, split: Split) -> ImageDataset:
        """A split without augmentation; cached after the first call."""
        if split not in ("train", "val", self.tests_on):
            raise ValueError(f"split must be 'train' or 'val' (also for testing), got {split!r}.")
        if split not in self._datasets:
            self._datasets[split] = self.load(split)
        return self._datasets[split]

    def in_order(self, split: Split, num_replicas: int = 1, rank: int = 0) -> "DataLoader[Batch]":
        """Return a loader that visits each image of a split once, in order, without augmentation.

        The images are divided over `num_replicas` processes, each of which gets the same number of
        batches.
        """
        dataset = self.dataset(split)
        batch_size = even_batch_size(len(dataset), num_replicas, self.batch_size)
        sampler = UnrepeatedDistributedSampler(dataset, num_replicas, rank, shuffle=False)
        return DataLoader(dataset, sampler=sampler, **self._loader_options(batch_size))

    def images(self, split: Split) -> Tensor:
        """All images of a split, (N, C, H, W) uint8, in order and without augmentation."""
        return torch.cat([images for images, _, _ in self.in_order(split)])

    def fingerprint(self, split: Split) -> str:
        """Hash of images and labels, as 16 hex digits. It is the key of cached statistics."""
        pixels = hashlib.sha256(repr(self.image_shape).encode())
        conditions: defaultdict[int, Any] = defaultdict(hashlib.sha256)  # one per condition tensor
        for images, labels, _ in self.in_order(split):
            pixels.update(images.numpy().tobytes())
            for i, part in enumerate((labels,) if isinstance(labels, Tensor) else labels):
                conditions[i].update(part.numpy().tobytes())
        digests = [each.digest() for each in (pixels, *conditions.values())]
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]

    # Hooks of the Trainer

    def prepare_data(self) -> None:
        """Check the data, except for prediction, which only generates images."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.PREDICTING:
            self.check()

    def train_dataloader(self) -> "DataLoader[Batch]":
        """Shuffled and augmented batches, all of `batch_size`."""
        if (self.num_workers or 0) > 16 * usable_cores():
            raise ValueError(
                f"num_workers must be at most 16 for each of the {usable_cores()} cores here, got "
                f"{self.num_workers}."
            )
        dataset = replace(self.dataset("train"), seed=self.seed)
        num_replicas, rank = self._replicas_and_rank()
        if len(dataset) < self.batch_size * num_replicas:
            raise ValueError(
                f"An epoch needs a full batch on every process: batch_size {self.batch_size} on"
                f" {num_replicas} process(es) is more than the {len(dataset)} training images."
            )
        sampler = ShuffledSampler(dataset, self.seed, num_replicas, rank)
        return ResumableLoader(
            dataset,
            lambda: batches_done_in_epoch(self.trainer) if self.trainer else 0,
            sampler=sampler,
            drop_last=True,
            **self._loader_options(self.batch_size),
        )

    def val_dataloader(self) -> "DataLoader[Batch]":
        """Every held-out image once, over all processes."""
        return self.in_order("val", *self._replicas_and_rank())

    def test_dataloader(self) -> "DataLoader[Batch]":
        """Every image of the split `tests_on` once, over all processes."""
        if self.tests_on == "val":
            rank_zero_info("The data have no test split: this is the validation split.")
        return self.in_order(self.tests_on, *self._replicas_and_rank())

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches (seeds, labels) of the images to generate, each on exactly one process."""
        num_replicas, _ = self._replicas_and_rank()
        require_at_least(num_replicas, num_predict=self.num_predict)  # each process needs one
        seeds = torch.arange(self.num_predict)
        condition = self.condition_of(seeds)
        conditions = condition if isinstance(condition, Tensor) else TensorDataset(*condition)
        parts: list[Any] = [seeds, conditions]  # tensors are not typed as data sets
        return DataLoader(StackDataset(*parts), batch_size=self.batch_size)

    def condition_of(self, seeds: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Labels (B,) int64, or another condition, of images to generate from seeds (B,)."""
        if not self.num_classes:
            return torch.full_like(seeds, -1)
        return torch.tensor(classes_of(seeds.tolist(), self.num_classes))

    def state_dict(self) -> dict[str, Any]:
        """Return the class names, and the number of images per batch over all processes.

        `load_state_dict` uses this number to convert the progress of an epoch.
        """
        num_replicas, _ = self._replicas_and_rank()
        names = list(self.class_names)
        return {"images_of_a_batch": self.batch_size * num_replicas, "class_names": names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Convert the epoch progress of a checkpoint to the batch size of this run."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        state = self.state_dict()
        names = state["class_names"]
        if (old_names := state_dict.get("class_names", names)) != names:
            rank_zero_warn(f"The classes were {old_names}, and labels now mean {names}.")
        sizes = state_dict["images_of_a_batch"], state["images_of_a_batch"]
        if sizes[0] != sizes[1]:
            rescale_progress(trainer, *sizes, len(self.train_dataloader()))

    def _replicas_and_rank(self) -> tuple[int, int]:
        """Number of processes that share the data, and the rank of this process."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (kwargs["num_replicas"], kwargs["rank"]) if kwargs else (1, 0)

    def _loader_options(self, batch_size: int) -> dict[str, Any]:
        workers = self.default_workers() if self.num_workers is None else self.num_workers
        return {
            "batch_size": batch_size,
            "collate_fn": identity_collate,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            # Batch systems also signal workers. Only forked workers survive these signals.
            "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
            "pin_memory": torch.cuda.is_available(),
        }


def identity_collate(batch: Any) -> Any:
    """Return the argument unchanged, as `collate_fn` of a dataset whose items are whole batches."""
    return batch


def split_rows(
    split: Split, keys: Sequence[int] | Sequence[str], num_val: int, source: object
) -> Tensor:
    """Select the images of a split by a hash of their keys.

    The `num_val` images with the smallest hashes `fold("held out", key)` are held out.

    Args:
        split: "val" selects the held-out images. Any other value selects the remaining images.
        keys: one key per image, such as its index or name.
        num_val: number of images to hold out.
        source: origin of the images, for the error message.

    Returns:
        (n,) int64, the sorted indices of the images in the split.

    Raises:
        ValueError: unless `0 < num_val < len(keys)`.

    Example:
        >>> val, train = (split_rows(split, range(10), 3, "a set") for split in ("val", "train"))
        >>> len(val), torch.cat([val, train]).sort().values.tolist() == [*range(10)]
        (3, True)
    """
    if not 0 < num_val < len(keys):
        raise ValueError(
            f"val={num_val} images cannot be held out of the {len(keys)} in {source}: choose a "
            f"number from 1 to {len(keys) - 1}."
        )
    hashes = (fold("held out", key) for key in keys)
    order = torch.from_numpy(np.fromiter(hashes, np.int64, len(keys))).argsort()
    return (order[:num_val] if split == "val" else order[num_val:]).sort().values


def require_at_least(least: int, **values: int) -> None:
    """Raise ValueError if one of the named values is below `least`, or is 2^63 or more."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}.")
        if value >= 2**63:
            raise ValueError(f"{name} must be below 2^63, got {value}.")
