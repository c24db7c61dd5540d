"""Records of evaluations: an FID with its whole protocol, training images so far, and duration."""

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

from lit_diffusion.files import atomic_write_text

EMA_CURVE = "ema-curve.jsonl"
"""File of a run folder: one record for each averaging width that `evaluate --ema` has scored."""

# Fields that an evaluation measures; all others describe how it measured.
_RESULTS = {
    *("images", "value", "floor", "floor_sd", "floor_images"),
    *("non_finite", "non_finite_seeds", "seconds", "second_look"),
}


@dataclass(frozen=True, kw_only=True)
class FIDRecord:
    """One evaluation with its whole protocol, as plain builtins: a line of evaluations.jsonl."""

    metric: str  # name it was logged under, which ends in the number of samples
    value: float | None  # the FID; None where samples were not finite
    step: int  # optimizer steps completed
    images: int | None  # training images so far on all processes; None if not known
    num_fake: int  # samples generated
    num_real: int  # images compared with
    reference: str  # split or path of those
    data: str  # fingerprint of their pixels
    protocol: str  # name of the FID protocol
    extractor_sha256: str  # of its weights
    resize: str  # of the images before the extractor, in words
    weights: str  # name of the weights that generated: ema, raw, ...
    ema_decay: float | None = None  # per optimizer step; None: not an average of one known decay
    seeds: tuple[int, int]  # first, one past the last; the first is 0 unless repeated
    labels: str | None  # how a seed gave a label; None for unconditional sampling
    sampling: dict[str, Any]  # solver, steps, guidance, ... from the module's sampling_record()
    floor: float  # FID of real images in place of samples, the mean over draws of them
    floor_sd: float | None = None  # over the draws; None for a single draw
    floor_images: str  # which ones, and how many
    non_finite: int  # number of samples that are NaN or infinite
    non_finite_seeds: list[int]  # the first of them
    second_look: dict[str, float | None] = field(default_factory=dict)  # auxiliary metrics
    seconds: dict[str, float]  # by phase, total, estimated after a batch; of the first process


def is_repeat(record: Mapping[str, Any]) -> bool:
    """Whether a line of evaluations.jsonl scores a step again with other samples.

    Such a line shows how much the FID depends on the samples, and is not a point of the curve.
    """
    return "seeds" in record and record["seeds"][0] != 0


def finite_or_none(value: float) -> float | None:
    """The value, or None in place of NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def write_evaluation(path: Path, record: FIDRecord) -> None:
    """Write a line of evaluations.jsonl, in place of one of the same step and protocol.

    A run that resumes from before that step scores it again; lines that were measured otherwise
    stay. A record without `images`, as of an evaluation outside of a fit, takes those of the old
    line.

    Raises:
        ValueError: if the file there is not lines of JSON.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        records = [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {str(error)[:200]}.") from error
    new = json.loads(json.dumps(asdict(record)))
    protocol = new.keys() - _RESULTS
    same = []
    for i, old in enumerate(records):
        old = {"ema_decay": record.ema_decay} | old  # which earlier versions did not write
        if all(name in old and old[name] == new[name] for name in protocol):
            same.append(i)
    counts = [records[i]["images"] for i in same if records[i].get("images") is not None]
    if record.images is None and counts:
        record = replace(record, images=counts[-1])
    first = same[0] if same else len(lines)
    after = [lines[i] for i in range(first, len(lines)) if i not in same]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*lines[:first], json.dumps(asdict(record)), *after])
    atomic_write_text(path, text + "\n")


class ImageCount(NamedTuple):
    """Counts training images on all processes, through resumes that change the batch size.

    `images` had been trained on when `batches` of one process were done; each batch since then has
    `per_batch` images on all processes. None means unknown.
    """

    images: int | None
    batches: int
    per_batch: int | None

    def at(self, batches: int) -> int | None:
        """Images after so many batches of one process, those before a resume included."""
        if self.images is None or self.per_batch is None:
            return None
        return self.images + (batches - self.batches) * self.per_batch

    def resumed(self, batches: int, per_batch: int | None) -> "ImageCount":
        """The count that goes on after `batches`, from which on each has `per_batch` images."""
        if per_batch == self.per_batch:
            return self
        return ImageCount(self.at(batches), batches, per_batch)

    def now(self, trainer: Trainer) -> int | None:
        """Images so far in a fit."""
        return self.at(_batches_done(trainer))


def start_image_count(trainer: Trainer, previous: ImageCount | None = None) -> ImageCount:
    """The count for a fit that starts, which continues the `previous` one of a checkpoint.

    Without `previous`, all batches before a resume count with the present batch size.
    """
    batch_size = getattr(trainer.train_dataloader, "batch_size", None)
    per_batch = int(batch_size * trainer.world_size) if batch_size else None
    count = previous or ImageCount(0, 0, per_batch)
    return count.resumed(_batches_done(trainer), per_batch)


def parse_image_count(state: Any) -> ImageCount | None:
    """The count in a checkpoint, which is a list of three numbers or None.

    Raises:
        ValueError: for anything else.
    """
    if state is None:
        return None
    is_count = isinstance(state, list) and len(state) == 3
    if not is_count or not all(n is None or (type(n) is int and 0 <= n < 2**63) for n in state):
        raise ValueError(f"images_seen must be three counts, got {state!r:.100}.")
    return ImageCount(*state)


def count_training_images(trainer: Trainer) -> int | None:
    """Training images of a fit so far on all processes; None if the batch size is not known."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(count := getattr(callback, "image_count", None), ImageCount):
            return count.now(trainer)
    return start_image_count(trainer).now(trainer)


def _batches_done(trainer: Trainer) -> int:
    """Training batches of this process, those before a resume included."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


class EvaluationClock:
    """Times the phases of an evaluation and prints how long it will take.

    Args:
        title: begins each line.
        total: number of samples.
        interval: seconds between lines after the first, which comes after the first batch.
    """

    def __init__(self, title: str, total: int, interval: float = 30.0) -> None:
        self._title, self._total, self._interval = title, total, interval
        self._phases: dict[str, float] = defaultdict(float)
        self._done = 0
        self._estimate = 0.0
        self._start = self._last_line = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context that adds its duration to the phase `name`."""
        start = time.monotonic()
        yield
        self._phases[name] += time.monotonic() - start

    def tick(self, samples: int) -> None:
        """Count finished samples, and print a line if it is time for one."""
        self._done = min(self._done + samples, self._total)
        if self._done == 0:
            return
        expected = sum(self._phases.values()) / self._done * self._total
        if not self._estimate:
            self._estimate = expected
            rank_zero_info(f"{self._title}: {self._total} samples take about {expected:.3g} s.")
        elif time.monotonic() - self._last_line > self._interval:
            self._last_line = time.monotonic()
            left = expected * (1 - self._done / self._total)
            rank_zero_info(f"{self._title}: {self._done} of {self._total}, {left:.0f} s left.")

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in "total" so far, and as "estimated" after the first batch."""
        total = time.monotonic() - self._start
        times = {**self._phases, "total": total, "estimated": self._estimate}
        return {name: round(value, 3) for name, value in times.items()}
