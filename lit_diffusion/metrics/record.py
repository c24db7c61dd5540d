"""What has to be written beside an FID for it to mean something."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_diffusion.files import atomic_write_text

# What an evaluation finds out; all else in its record is how it measured.
_RESULTS = {
    *("images", "value", "floor", "floor_sd", "floor_images"),
    *("non_finite", "non_finite_seeds", "seconds", "second_look"),
}


EMA_CURVE = "ema-curve.jsonl"
"""File of a run folder: a record for each width of averaging that `evaluate --ema` has scored."""


@dataclass(frozen=True, kw_only=True)
class FIDRecord:
    """One evaluation with its whole protocol; plain builtins only."""

    metric: str  # name it was logged under, which ends in the number of samples
    value: float | None  # the FID; None where samples were not finite
    step: int  # optimizer steps completed
    images: int | None  # training images seen by then on all processes; None if not known
    num_fake: int  # samples generated
    num_real: int  # images compared with
    reference: str  # split or path of those
    data: str  # fingerprint of their pixels
    protocol: str  # name of the FID protocol
    extractor_sha256: str  # of its weights
    resize: str  # of the images before the extractor, in words
    weights: str  # name of the weights that generated: ema, raw, ...
    ema_decay: float | None = None  # per optimizer step; None: no averages of one known decay
    seeds: tuple[int, int]  # first, one past the last; 0 is first but for repeats
    labels: str | None  # how a seed gave a label; None for unconditional sampling
    sampling: dict[str, Any]  # solver, steps, guidance, ... as the module tells them
    floor: float  # FID of real images in place of samples, the mean over draws of them
    floor_sd: float | None = None  # over the draws; None where there was one draw only
    floor_images: str  # which ones, and how many
    non_finite: int  # number of samples that are NaN or infinite
    non_finite_seeds: list[int]  # the first of them
    second_look: dict[str, float | None] = field(default_factory=dict)  # metrics/second_look.py
    seconds: dict[str, float]  # by phase, total, estimated after a batch; of the first process


def is_repeat(record: Mapping[str, Any]) -> bool:
    """Whether a line of evaluations.jsonl measures a step again with other samples.

    Such a line tells how much the FID depends on the samples, and is no point of the curve.
    """
    return "seeds" in record and record["seeds"][0] != 0


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def write_evaluation(path: Path, record: FIDRecord) -> None:
    """Add a line to evaluations.jsonl, in place of one of the same step and protocol.

    A run that resumes from before that step scores it again; a number that was measured otherwise
    stays. Where the record does not know the images seen by then, as outside of a fit, those of the
    old line stay too. The file is replaced as a whole, so a crash leaves the old one.
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
    first = same[0] if same else len(lines)
    kept = [*lines[:first], line, *(lines[i] for i in range(first, len(lines)) if i not in same)]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, "\n".join(kept) + "\n")


def _supersedes(record: FIDRecord, old: dict[str, Any]) -> bool:
    """Whether `old` says of all that was measured, and how, what `record` says."""
    new = json.loads(json.dumps(asdict(record)))
    told = {"ema_decay": record.ema_decay} | old  # lines of earlier versions do not tell it
    return all(name in told and told[name] == new[name] for name in new.keys() - _RESULTS)
