"""Record the results of evaluations, count training images, and time evaluations."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from lit_diffusion.files import atomic_write_text, checked_read

EMA_CURVE = "ema-curve.jsonl"
"""File in a run folder with one record per EMA averaging width that `evaluate --ema` has scored."""

# Fields that contain results of an evaluation. All other fields describe how it was measured.
_RESULT_FIELDS = {
    *("images", "value", "floor", "floor_sd", "floor_images"),
    *("non_finite", "non_finite_seeds", "seconds", "second_look"),
}


@dataclass(frozen=True, kw_only=True)
class FIDRecord:
    """Record of an evaluation (a line of evaluations.jsonl): the FID and how it was measured.

    All values are plain builtins, so that they can be written as JSON.

    Attributes:
        metric: name under which the FID is logged. It ends in the number of samples.
        value: the FID; None if any sample was NaN or infinite.
        step: number of completed optimizer steps.
        images: number of training images up to this step, over all processes; None if unknown.
        num_fake: number of samples.
        num_real: number of reference images.
        reference: split or path of the reference images.
        data: fingerprint of the reference images' pixels.
        protocol: name of the FID protocol, such as "inception-v3-compat".
        extractor_sha256: SHA-256 of the extractor's weights.
        resize: description of how images are resized before the extractor.
        weights: name of the weights that generated the samples, such as "ema" or "raw".
        ema_decay: decay of the weight average per optimizer step; None if there is no single decay.
        seeds: first seed, and last seed plus one. The first seed is 0, unless the step is evaluated
            again with different samples.
        labels: rule that maps seeds to labels; None for unconditional sampling.
        sampling: solver, steps, guidance and other settings from `module.sampling_record()`.
        floor: real-data floor, the FID of real images that take the place of the samples. If these
            images are drawn several times, it is the mean FID of the draws.
        floor_sd: standard deviation of the FID over the draws; None for a single draw.
        floor_images: description of the real images with which the floor was measured.
        non_finite: number of samples that contain NaN or infinity.
        non_finite_seeds: seeds of the first few of these samples.
        second_look: auxiliary metrics by name.
        seconds: duration of the evaluation on the first process, as in `EvaluationClock.seconds`.
    """

    metric: str
    value: float | None
    step: int
    images: int | None
    num_fake: int
    num_real: int
    reference: str
    data: str
    protocol: str
    extractor_sha256: str
    resize: str
    weights: str
    ema_decay: float | None = None
    seeds: tuple[int, int]
    labels: str | None
    sampling: dict[str, Any]
    floor: float
    floor_sd: float | None = None
    floor_images: str
    non_finite: int
    non_finite_seeds: list[int]
    second_look: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float]


def is_fid(metric: str) -> bool:
    """Return whether a metric is an FID or another Frechet distance, judged by its name.

    Example:
        >>> [is_fid(name) for name in ("val/fid_50k", "test/fd_dinov2_50k", "val/loss")]
        [True, True, False]
    """
    return metric.rpartition("/")[2].startswith(("fid_", "fd_"))


def is_repeat(record: Mapping[str, Any]) -> bool:
    """Return whether a record evaluates a step again, with different samples.

    Repeated evaluations show how much the FID depends on the samples. Curves of the FID over
    training steps leave them out.
    """
    return "seeds" in record and record["seeds"][0] != 0


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def write_evaluation(path: Path, record: FIDRecord) -> None:
    """Write a record to evaluations.jsonl, and replace older records of the same measurement.

    Two records belong to the same measurement if their steps and all settings are equal, for
    example because a run resumed from an earlier step and repeated an evaluation. If
    `record.images` is None, as after an evaluation outside a fit, the number of training images is
    copied from the record that is replaced. The file is created if it does not exist.

    Raises:
        ValueError: if a line of the existing file is not JSON.
    """
    lines, records = list[str](), list[dict[str, Any]]()
    if path.exists():
        with checked_read(path, "list of evaluations", "repair or remove it") as file:
            lines = file.read_text().splitlines()
            records = [dict(json.loads(line)) for line in lines]
    new = json.loads(json.dumps(asdict(record)))
    protocol = new.keys() - _RESULT_FIELDS
    replaced = []
    for i, old in enumerate(records):
        old = {"ema_decay": record.ema_decay} | old  # missing in records of earlier versions
        if all(name in old and old[name] == new[name] for name in protocol):
            replaced.append(i)
    counts = [records[i]["images"] for i in replaced if records[i].get("images") is not None]
    if record.images is None and counts:
        record = replace(record, images=counts[-1])
    first = replaced[0] if replaced else len(lines)
    remaining = [lines[i] for i in range(first, len(lines)) if i not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*lines[:first], json.dumps(asdict(record)), *remaining])
    atomic_write_text(path, text + "\n")


class ImageCount(NamedTuple):
    """Counts the training images of all processes, even if a resume changes the batch size.

    The count is `images` when each process has trained on `batches` batches. After that, it grows
    by `per_batch` each time that every process trains on one more batch. `images` and `per_batch`
    are None if they are unknown.

    Example:
        >>> ImageCount(images=1000, batches=10, per_batch=64).at(batches=12)
        1128
    """

    images: int | None
    batches: int
    per_batch: int | None

    def at(self, batches: int) -> int | None:
        """Return the number of training images when each process has trained on `batches` batches.

        `batches` includes the batches before a resume. The result is None if it is unknown.
        """
        if self.images is None or self.per_batch is None:
            return None
        return self.images + (batches - self.batches) * self.per_batch

    def resumed(self, batches: int, per_batch: int | None) -> "ImageCount":
        """Return the count for a resume after `batches` batches with a new `per_batch`."""
        if per_batch == self.per_batch:
            return self
        return ImageCount(self.at(batches), batches, per_batch)

    def now(self, trainer: Trainer) -> int | None:
        """Return the number of training images so far in the current fit.

        In contrast to `at`, the last batch of each epoch may be smaller than the others.
        """
        batches, missing = _batches_done(trainer), _missing_per_epoch(trainer)
        count = self.at(batches)
        if count is None or missing == 0:
            return count
        num = int(trainer.num_training_batches)
        return count - missing * (batches // num - self.batches // num)


def start_image_count(trainer: Trainer, previous: ImageCount | None = None) -> ImageCount:
    """Return the count of training images at the start of a fit.

    `previous` is the count in the checkpoint from which the fit resumes. If it is None, the
    function assumes that batches before the resume had the current batch size.
    """
    batch_size = getattr(trainer.train_dataloader, "batch_size", None)
    per_batch = int(batch_size * trainer.world_size) if batch_size else None
    count = previous or ImageCount(0, 0, per_batch)
    return count.resumed(_batches_done(trainer), per_batch)


def parse_image_count(state: Any) -> ImageCount | None:
    """Parse the image count of a checkpoint: None, or a list with the fields of `ImageCount`.

    Raises:
        ValueError: if the value is neither.

    Example:
        >>> parse_image_count([1000, 10, 64])
        ImageCount(images=1000, batches=10, per_batch=64)
    """
    if state is None:
        return None
    is_count = isinstance(state, list) and len(state) == 3
    if not is_count or not all(n is None or (type(n) is int and 0 <= n < 2**63) for n in state):
        raise ValueError(f"images_seen must be three counts, got {state!r:.100}.")
    return ImageCount(*state)


def count_training_images(trainer: Trainer) -> int | None:
    """Return the number of training images of a fit so far, over all processes; None if unknown."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(count := getattr(callback, "image_count", None), ImageCount):
            return count.now(trainer)
    return start_image_count(trainer).now(trainer)


def _batches_done(trainer: Trainer) -> int:
    """Return the number of training batches on this process, including batches before a resume."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return total.processed


def _missing_per_epoch(trainer: Trainer) -> int:
    """Return how many images the last batch of an epoch lacks, over all processes."""
    loader: Any = trainer.train_dataloader
    is_ragged = isinstance(loader, DataLoader) and loader.batch_size and not loader.drop_last
    if not is_ragged or isinstance(loader.dataset, IterableDataset):
        return 0
    if trainer.num_training_batches != len(loader):  # the last batch is left out
        return 0
    return int(-len(loader.sampler) % loader.batch_size * trainer.world_size)


class EvaluationClock:
    """Timer of the phases of an evaluation, which also prints how long the evaluation will take.

    Args:
        title: prefix of each printed line.
        total: number of samples in the evaluation.
        interval: minimum number of seconds between printed lines. The first line is printed after
            the first batch of samples.

    Example:
        >>> clock = EvaluationClock("FID", total=100)
        >>> with clock.phase("generate"):
        ...     pass
        >>> sorted(clock.seconds())
        ['estimated', 'generate', 'total']
    """

    def __init__(self, title: str, total: int, interval: float = 30.0) -> None:
        self._title, self._total, self._interval = title, total, interval
        self._phases: dict[str, float] = defaultdict(float)
        self._done = 0
        self._estimate = 0.0
        self._start = self._last_line = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context whose duration is added to the phase `name`."""
        start = time.monotonic()
        yield
        self._phases[name] += time.monotonic() - start

    def tick(self, samples: int) -> None:
        """Add `samples` to the number of finished samples, and print progress from time to time."""
        self._done = min(self._done + samples, self._total)
        if self._done == 0:
            return
        expected = sum(self._phases.values()) / self._done * self._total
        if not self._estimate:
            self._estimate = expected
            rank_zero_info(f"{self._title}: {self._total} samples take about {expected:.3g} s.")
        elif time.monotonic() - self._last_line > self._interval:
            self._last_line = time.monotonic()
            remaining = expected * (1 - self._done / self._total)
            rank_zero_info(f"{self._title}: {self._done} of {self._total}, {remaining:.0f} s left.")

    def seconds(self) -> dict[str, float]:
        """Return durations in seconds: each phase, the "total" so far and the "estimated" total."""
        total = time.monotonic() - self._start
        times = {**self._phases, "total": total, "estimated": self._estimate}
        return {name: round(value, 3) for name, value in times.items()}
