"""What has to be written beside an FID for it to mean something."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_diffusion.files import replace_text

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# What an evaluation finds out; all else in its record is how it measured.
_RESULTS = {
    "images",
    "value",
    "floor",
    "floor_sd",
    "floor_images",
    "non_finite",
    "non_finite_seeds",
    "seconds",
}


@dataclass(frozen=True, kw_only=True)
class FIDRecord:
    """One evaluation with its whole protocol; plain builtins only.

    Attributes:
        metric: name it was logged under, which ends in the number of samples.
        value: the FID; None where samples were not finite.
        step: optimizer steps completed.
        images: training images seen by then on all processes; None where that is not known.
        num_fake: samples generated.
        num_real: images compared with.
        reference: split or path of those.
        data: fingerprint of their pixels.
        protocol: name of the FID protocol.
        extractor_sha256: of its weights.
        resize: of the images before the extractor, in words.
        weights: name of the weights that generated: ema, raw, ...
        ema_decay: of these per optimizer step; None where they are no averages of one known decay.
        seeds: [first, one past the last] of the samples; the first is 0 but for repeats.
        labels: how a seed gave a label; None for unconditional sampling.
        sampling: solver, steps, guidance, ... as the module tells them.
        floor: FID of real images in place of samples, the mean over draws of them.
        floor_sd: standard deviation over the draws; None where there was one draw only.
        floor_images: which ones, and how many.
        non_finite: number of samples that are NaN or infinite.
        non_finite_seeds: the first of them.
        seconds: generate, features and total of the first process, and the total `estimated` after
            the first batch.
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
    seconds: dict[str, float]


def is_repeat(record: Mapping[str, Any]) -> bool:
    """Whether a line of evaluations.jsonl measures a step again with other samples.

    Such a line tells how much the FID depends on the samples, and is no point of the curve.

    Example:
        >>> is_repeat({"seeds": [0, 360]}), is_repeat({"seeds": [360, 720]})
        (False, True)
    """
    return "seeds" in record and record["seeds"][0] != 0


class ImageCount(NamedTuple):
    """Training images seen by all processes, all batches taken for full ones.

    Args:
        images: seen when `batches` were done; None where that is not known.
        batches: of one process.
        each: images of every batch since then; None where that is not known.

    Example:
        >>> count = ImageCount(0, 0, each=64).resumed(batches=2000, each=128)
        >>> count.at(2010)
        129280
    """

    images: int | None
    batches: int
    each: int | None

    def at(self, batches: int) -> int | None:
        """Images seen when so many batches are done, those before a resume included."""
        if self.images is None or self.each is None:
            return None
        return self.images + (batches - self.batches) * self.each

    def resumed(self, batches: int, each: int | None) -> "ImageCount":
        """What counts from `batches` on, of which every one now has `each` images."""
        return self if each == self.each else ImageCount(self.at(batches), batches, each)


def batches_done(trainer: "Trainer") -> int:
    """Training batches of this process, those before a resume included."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def images_of_a_batch(trainer: "Trainer") -> int | None:
    """Training images of a batch on all processes; None where the batch size is not known."""
    batch_size = getattr(trainer.train_dataloader, "batch_size", None)
    return int(batch_size * trainer.world_size) if batch_size else None


def images_seen(trainer: "Trainer") -> int | None:
    """Training images of a fit so far, by the `image_count` of a callback that has one.

    Without, as if all batches, those before a resume too, had been of the present size.

    Args:
        trainer: in or after `fit`.

    Returns:
        Their number on all processes; None where the batch size is not known.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    counts = [getattr(callback, "image_count", None) for callback in callbacks]
    known = [count for count in counts if isinstance(count, ImageCount)]
    count = known[0] if known else ImageCount(0, 0, images_of_a_batch(trainer))
    return count.at(batches_done(trainer))


def short_count(count: int) -> str:
    """A number of samples as metric names have it.

    Example:
        >>> short_count(360), short_count(50_000)
        ('360', '50k')
    """
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def write_evaluation(path: Path, record: FIDRecord) -> None:
    """Add a line to evaluations.jsonl, in place of one of the same step and protocol.

    A run that resumes from before that step scores it again; a number that was measured otherwise
    stays. Where the record does not know the images seen by then, as outside of a fit, those of the
    old line stay too. The file is replaced as a whole, so a crash leaves the old one.

    Args:
        path: of the file, made if need be.
        record: to write.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        olds = [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {str(error)[:200]}.") from error
    same = [i for i, old in enumerate(olds) if _supersedes(record, old)]
    known = [olds[i]["images"] for i in same if olds[i].get("images") is not None]
    images = known[-1] if record.images is None and known else record.images
    line = json.dumps(asdict(replace(record, images=images)))
    first, *doubled = same or [len(lines)]
    lines[first : first + 1] = [line]
    kept = [line for i, line in enumerate(lines) if i not in doubled]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "\n".join(kept) + "\n")


def _supersedes(record: FIDRecord, old: dict[str, Any]) -> bool:
    """Whether `old` says of all that was measured, and how, what `record` says."""
    new = json.loads(json.dumps(asdict(record)))
    told = {"ema_decay": record.ema_decay} | old  # lines of earlier versions do not tell it
    return all(name in told and told[name] == new[name] for name in new.keys() - _RESULTS)
