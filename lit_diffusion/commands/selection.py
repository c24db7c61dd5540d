"""Which runs of an experiment may be compared, and why the others may not."""

import reprlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lit_diffusion.commands.arms import BASELINE
from lit_diffusion.commands.experiment import (
    Record,
    Run,
    protocol_of,
    sampling_of,
    settings_that_differ,
)

_SHOWN = 6
_Difference = Callable[[Run, Run, str], str | None]


@dataclass(frozen=True)
class Selection:
    """Runs of equal protocol, by arm.

    Attributes:
        metric: name of their FID.
        baseline: name of the arm that the others are compared with.
        arms: runs of each, which differ in the seed alone.
        left_out: run and reason, of all others.
    """

    metric: str
    baseline: str
    arms: Mapping[str, Sequence[Run]]
    left_out: Sequence[tuple[str, str]]


def select(
    runs: Sequence[Run], baseline: str | None = None, metric: str | None = None
) -> Selection:
    """Sort runs into arms; leave out those whose FIDs cannot stand beside the others.

    Left out are FIDs of another protocol than most of the baseline's, runs that draw samples in
    another way than most of their arm, and runs that were cut short or have a broken file.

    Args:
        runs: of an experiment.
        baseline: name of an arm; None is the one called baseline, else the first.
        metric: name of the FID; None is the one that most runs have.

    Raises:
        ValueError: where less than two arms are left, the baseline is not among them, seeds of an
            arm were configured differently, or one seed is there twice.
    """
    left_out = {run: run.fault for run in runs if run.fault}
    if runs and len(left_out) == len(runs):
        raise ValueError(f"none of these runs can be read. The first: {left_out[runs[0]]}.")
    sound = [run for run in runs if run not in left_out]
    metric = metric or usual_metric(sound)
    left_out |= {
        run: why for run in sound if (why := _without(run, metric) or _impossible(run, metric))
    }
    scored = [run for run in runs if run not in left_out]
    base = _baseline_of(scored, baseline)
    wanted = _usual([run for run in scored if run.arm == base], _other_protocol, metric)
    left_out |= {run: why for run in scored if (why := _other_protocol(run, wanted, metric))}
    for members in _by_arm(run for run in scored if run not in left_out).values():
        usual = _usual(members, _other_sampling, metric)
        left_out |= {run: why for run in members if (why := _other_sampling(run, usual, metric))}
    for members in _by_arm(run for run in scored if run not in left_out).values():
        left_out |= {run: why for run in members if (why := _cut_short(run, members, metric))}
    arms = _by_arm(run for run in scored if run not in left_out)
    told = [(str(run.path), why) for run, why in left_out.items()]
    _refuse_too_few(arms, base, told)
    for arm, members in arms.items():
        _refuse_twice(arm, members)
        _refuse_unequal(arm, members)
    return Selection(metric, base, arms, told)


def usual_metric(runs: Iterable[Run]) -> str:
    """The FID that most runs have; one on validation data, if there is one.

    Raises:
        ValueError: where no run has one, or several are as frequent.
    """
    held = Counter(metric for run in runs for metric in _metrics(run))
    curves = {metric: n for metric, n in held.items() if metric.startswith("val/")} or held
    most = [metric for metric, count in curves.items() if count == max(curves.values())]
    if not most:
        raise ValueError(
            "none of these runs has an FID in its evaluations.jsonl: add "
            "lit_diffusion.callbacks.FIDEvaluation to trainer.callbacks."
        )
    if len(most) > 1:
        raise ValueError(f"the runs have several FIDs: choose --metric {' or '.join(most)}.")
    return most[0]


def _metrics(run: Run) -> list[str]:
    names = dict.fromkeys(str(record.get("metric")) for record in run.records)
    return [name for name in names if "fid" in name]


def _by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    arms = defaultdict(list)
    for run in runs:
        arms[run.arm].append(run)
    return dict(arms)


def _baseline_of(runs: Sequence[Run], wanted: str | None) -> str:
    arms = list(dict.fromkeys(run.arm for run in runs))
    if not arms:
        raise ValueError("none of these runs has an FID that can be compared.")
    if wanted is not None and wanted not in arms:
        raise ValueError(
            f"there is no arm {wanted!r} with an FID for --baseline; there are {arms}."
        )
    return wanted or (BASELINE if BASELINE in arms else arms[0])


def _without(run: Run, metric: str) -> str | None:
    if run.points(metric):
        return None
    if others := _metrics(run):
        return f"it has no {metric}, but {', '.join(others)}"
    if run.diverged:
        return "its training diverged before its first FID, which flatters its arm"
    step = run.last_logged.get("step")
    return "it has no FID" + (f"; metrics.csv ends at step {step}" if step else "")


def _impossible(run: Run, metric: str) -> str | None:
    """Why the numbers of a run can't be FIDs and counts of images."""
    points = run.points(metric)
    for point in (*points, *run.repeats(points[-1])):
        if point["value"] is not None and point["value"] <= 0:
            return (
                f"its {metric} of step {point['step']:,} is {point['value']}, and FIDs are above 0"
            )
    images = [point.get("images") for point in points]
    if None not in images and not _are_counts(images):
        return f"its numbers of images seen must be above 0 and grow, got {reprlib.repr(images)}"
    return None


def _are_counts(images: Sequence[Any]) -> bool:
    if not all(type(seen) in (int, float) and 0 <= seen < 2**63 for seen in images):
        return False
    return images[-1] > 0 and all(before < after for before, after in pairwise(images))


def _usual(runs: Sequence[Run], difference: _Difference, metric: str) -> Run:
    """The first of the runs from which the fewest of them differ."""
    return min(runs, key=lambda one: sum(difference(run, one, metric) is not None for run in runs))


def _other_protocol(run: Run, wanted: Run, metric: str) -> str | None:
    """Why the FIDs of two runs cannot be compared, naming what differs."""
    changed = _changes(run, wanted, metric, protocol_of)
    return changed and f"its FID is of another protocol than {wanted.path}'s: {changed}"


def _other_sampling(run: Run, usual: Run, metric: str) -> str | None:
    """Why FIDs of two runs of an arm cannot be averaged: arms may differ in this, seeds not."""
    changed = _changes(run, usual, metric, sampling_of)
    return changed and f"its samples are drawn otherwise than those of {usual.path}: {changed}"


def _changes(run: Run, other: Run, metric: str, aspect: Callable[[Record], Record]) -> str | None:
    """What differs of that which the last FIDs of both runs tell; None if nothing."""
    own, expected = (aspect(each.points(metric)[-1]) for each in (run, other))
    shared = [name for name in own if name in expected]
    changed = [f"{k} {own[k]!r}, not {expected[k]!r}" for k in shared if own[k] != expected[k]]
    return "; ".join(changed) or None


def _cut_short(run: Run, members: Iterable[Run], metric: str) -> str | None:
    """Why a run takes no part: an FID was still due, or, if that is not known, others have more.

    One that diverged stays: without it, an arm that diverges would look better than it is.
    """
    if run.diverged:
        return None
    steps = [point["step"] for point in run.points(metric)]
    if run.max_steps is None:
        end = max(member.points(metric)[-1]["step"] for member in members)
        told = f"cut short: its FIDs end at step {steps[-1]:,}, its arm's at {end:,}"
        return told if steps[-1] < end else None
    due = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else steps[-1])
    told = f"cut short: its FIDs end at step {steps[-1]:,} of {run.max_steps:,}"
    return told if due <= run.max_steps else None


def _refuse_too_few(
    arms: Mapping[str, Sequence[Run]], base: str, left_out: Sequence[tuple[str, str]]
) -> None:
    if len(arms) >= 2 and base in arms:
        return
    reasons = "".join(f"\n  {run}: {why}" for run, why in left_out[:_SHOWN])
    what = f"only the arm {next(iter(arms))} is" if len(arms) == 1 else "no arm is"
    if len(arms) >= 2:
        what = f"no run of the baseline {base} is"
    raise ValueError(f"a comparison needs a baseline and another arm, and {what} left.{reasons}")


def _refuse_twice(arm: str, members: Sequence[Run]) -> None:
    seen: dict[str, Run] = {}
    for run in members:
        other = seen.setdefault(run.seed, run)
        if other is not run:
            raise ValueError(
                f"arm {arm} holds seed {run.seed} twice: {other.path} and {run.path}. They would "
                "count as two; leave one out, or rename the folder of what is another arm."
            )


def _refuse_unequal(arm: str, members: Sequence[Run]) -> None:
    first, *others = members
    for run in others:
        _refuse_other_place(arm, first, run)
        changed = (
            settings_that_differ(first.config, run.config) if run.config and first.config else {}
        )
        if changed:
            told = [f"{name} {old!r} and {new!r}" for name, (old, new) in changed.items()]
            more = f" and {len(told) - _SHOWN} more" * (len(told) > _SHOWN)
            raise ValueError(
                f"{first.path} and {run.path} are both of arm {arm} and differ in "
                f"{'; '.join(told[:_SHOWN])}{more}. Seeds of one arm must be configured alike; put "
                "them into folders named after arms of their own."
            )


def _refuse_other_place(arm: str, first: Run, run: Run) -> None:
    """Folders of one name in two places may be two arms, which only configs tell."""
    places = [one.path.resolve().parent for one in (first, run)]
    lacking = [str(one.path) for one in (first, run) if not one.config]
    if places[0] != places[1] and lacking:
        raise ValueError(
            f"{first.path} and {run.path} are both of arm {arm}, in two places, and there is no "
            f"config.yaml in {' and '.join(lacking)} to tell whether they were configured alike. "
            "Compare one of the folders, or rename the other."
        )
