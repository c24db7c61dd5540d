"""What the data modules share: loaders whose every batch is a function of (seed, epoch, index)."""

import hashlib
import sys
from abc import abstractmethod
from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from lit_diffusion.data.datasets import Batch, ImageDataset
from lit_diffusion.data.loaders import ResumableLoader, batches_of_epoch, recount, usable_cores
from lit_diffusion.data.samplers import ShuffledSampler, even_batch_size
from lit_diffusion.seeding import classes_of, fold, run_seed

Split: TypeAlias = Literal["train", "val", "test"]


class Awaited(NamedTuple):
    """What is yet to be done before data can be opened: a sentence without its full stop."""

    text: str
    needs_network: bool


class ImageDataModule(LightningDataModule):
    """Base of the data modules: a subclass describes its images and loads a split.

    Training batches come in an order that is a function of (seed, epoch), without the ragged last
    batch: the images left over are others in the next epoch. A run that resumes in the middle of an
    epoch goes on there, also with another batch size or number of processes. Validation sees every
    image once on any number of processes, and so does testing: see `tests_on`. Prediction yields
    (seeds (B,), labels (B,)), both int64, of images to generate.

    Args:
        batch_size: images a batch on each process, >= 1. Validation on several processes may take
            a few more (`even_batch_size`).
        num_workers: loading processes of each process; None takes 0 for data in memory, where a
            batch costs microseconds, and what the CPU affinity allows for files.
        num_predict: number of seeds 0, 1, ... that prediction generates, >= 1; seed s has label
            s mod num_classes, or -1 without labels.
        seed: of training order and augmentation; None takes the run's (`seed_everything`), else 0.
            Splits and validation never depend on it.

    Raises:
        ValueError: If a number is out of its range.
    """

    tests_on: Literal["val", "test"] = "val"
    """Split that `test_dataloader` is of, by which its metrics are named; "test" where there is a
    test split, which `load` then opens."""

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
        self._opened: dict[Split, ImageDataset] = {}

    @property
    def seed(self) -> int:
        """Of training order and augmentation."""
        return (run_seed() or 0) if self._seed is None else self._seed

    # What a subclass says.

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
        """Open a split, not augmented."""

    def check(self) -> None:
        """Fetch the files or name what is wrong with them; runs once per node, before all else."""

    def awaited(self) -> Awaited | None:
        """What `check` would still fetch or unpack; None if nothing. Changes nothing itself."""
        return None

    def default_workers(self) -> int:
        """Number of loading processes where none is asked for."""
        return 0

    # What a user has in Python, with no Trainer.

    @property
    def num_classes(self) -> int | None:
        """Number of labels; None without labels."""
        return len(self.class_names) or None

    def dataset(self, split: Split) -> ImageDataset:
        """A split without augmentation, opened once."""
        if split not in ("train", "val", self.tests_on):
            raise ValueError(f"split must be 'train' or 'val' (also for testing), got {split!r}.")
        if split not in self._opened:
            self._opened[split] = self.load(split)
        return self._opened[split]

    def in_order(self, split: Split, num_replicas: int = 1, rank: int = 0) -> "DataLoader[Batch]":
        """Every image of a split once, without augmentation; a stream, so its size does not matter.

        Processes that share it, `num_replicas` of them, get the same number of batches.
        """
        dataset = self.dataset(split)
        batch_size = even_batch_size(len(dataset), num_replicas, self.batch_size)
        sampler = UnrepeatedDistributedSampler(dataset, num_replicas, rank, shuffle=False)
        return DataLoader(dataset, sampler=sampler, **self._options(batch_size))

    def images(self, split: Split) -> Tensor:
        """All images of a split, (N, C, H, W) uint8, in order and without augmentation."""
        return torch.cat([images for images, _, _ in self.in_order(split)])

    def fingerprint(self, split: Split) -> str:
        """16 hex digits that change when an image or label does: a key for caches of statistics."""
        pixels = hashlib.sha256(repr(self.image_shape).encode())
        told: defaultdict[int, Any] = defaultdict(hashlib.sha256)
        for images, labels, _ in self.in_order(split):
            pixels.update(images.numpy().tobytes())
            for i, part in enumerate((labels,) if isinstance(labels, Tensor) else labels):
                told[i].update(part.numpy().tobytes())
        digests = [found.digest() for found in (pixels, *told.values())]
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]

    # What the Trainer calls.

    def prepare_data(self) -> None:
        """Check the data, unless images are only generated."""
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
        num_replicas, rank = self._place()
        if len(dataset) < self.batch_size * num_replicas:
            raise ValueError(
                f"An epoch needs a full batch on every process: batch_size {self.batch_size} on"
                f" {num_replicas} process(es) is more than the {len(dataset)} training images."
            )
        sampler = ShuffledSampler(dataset, self.seed, num_replicas, rank)
        return ResumableLoader(
            dataset,
            lambda: batches_of_epoch(self.trainer) if self.trainer else 0,
            sampler=sampler,
            drop_last=True,
            **self._options(self.batch_size),
        )

    def val_dataloader(self) -> "DataLoader[Batch]":
        """Every held-out image once, over all processes."""
        return self.in_order("val", *self._place())

    def test_dataloader(self) -> "DataLoader[Batch]":
        """Every image of the split `tests_on` once, over all processes."""
        if self.tests_on == "val":
            rank_zero_info("The data have no test split: this is the validation split.")
        return self.in_order(self.tests_on, *self._place())

    def predict_dataloader(self) -> DataLoader[Any]:
        """(seeds, labels) of the images to generate; Lightning shares them out without repeats."""
        num_replicas, _ = self._place()
        require_at_least(num_replicas, num_predict=self.num_predict)  # each process needs one
        seeds = torch.arange(self.num_predict)
        condition = self.condition_of(seeds)
        rows = condition if isinstance(condition, Tensor) else TensorDataset(*condition)
        parts: list[Any] = [seeds, rows]  # a tensor is a data set, which its type does not say
        return DataLoader(StackDataset(*parts), batch_size=self.batch_size)

    def condition_of(self, seeds: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Labels (B,) int64, or another condition, that prediction generates from seeds (B,)."""
        if not self.num_classes:
            return torch.full_like(seeds, -1)
        return torch.tensor(classes_of(seeds.tolist(), self.num_classes))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint counts the done part of its epoch in, and what its labels mean."""
        names = list(self.class_names)
        return {"images_of_a_batch": self._images_of_a_batch(), "class_names": names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the Trainer count it in batches of this run."""
        before, now = state_dict["images_of_a_batch"], self._images_of_a_batch()
        trainer, names = self.trainer, list(self.class_names)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if (old := state_dict.get("class_names", names)) != names:
            rank_zero_warn(f"The classes were {old}, and labels now mean {names}.")
        if before != now:
            recount(trainer, before, now, len(self.train_dataloader()))

    def _images_of_a_batch(self) -> int:
        """Of training, on all processes."""
        return self.batch_size * self._place()[0]

    def _place(self) -> tuple[int, int]:
        """Number of processes that share the data, and rank of this one."""
        sharing = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (sharing["num_replicas"], sharing["rank"]) if sharing else (1, 0)

    def _options(self, batch_size: int) -> dict[str, Any]:
        """Of every DataLoader."""
        workers = self.default_workers() if self.num_workers is None else self.num_workers
        return {
            "batch_size": batch_size,
            "collate_fn": as_it_is,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            # Processes that are started otherwise die of the signals of a batch system.
            "multiprocessing_context": "fork" if workers and sys.platform == "linux" else None,
            "pin_memory": torch.cuda.is_available(),
        }


def as_it_is(batch: Any) -> Any:
    """Collation of a data set that fetches whole batches."""
    return batch


def rows_of(split: Split, num: int, val: int, where: object) -> Tensor:
    """Places (n,) int64, rising, of a split of the `num` images in `where` that holds out `val`.

    Held out are those whose places n have the least `fold("held out", n)`.
    """
    if val >= num:
        raise ValueError(f"val={val} cannot be held out of the {num} in {where}.")
    order = torch.tensor([fold("held out", n) for n in range(num)]).argsort()
    return (order[:val] if split == "val" else order[val:]).sort().values


def require_at_least(least: int, **values: int) -> None:
    """Raise ValueError if a named value is below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}.")
