"""Whether an arm that wins by FID wins by other measures of the same samples."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from lit_diffusion.lab.compare.comparison import (
    Arm,
    Comparison,
    Result,
    Verdict,
    by_measure,
    compare,
    misses,
)
from lit_diffusion.lab.compare.report.tables import Table
from lit_diffusion.lab.compare.report.wording import fid_text, reached_text, speedup_text
from lit_diffusion.lab.compare.speedup import CONFIDENCE, holm, welch
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES, FRACTIONS

_USUAL_SHARE = 0.5
"""Share memorized of new images; what is below is no better."""
_FASTER = "is faster by"
_STANDINGS = (
    "is slower by",
    "ends higher by",
    "has seeds that fall short by",
    "is not shown to be faster by",
    "is not measured by",
)


def look_again(comparison: Comparison) -> dict[str, Comparison]:
    """The comparison by other distances, to the lowest that all seeds of the baseline reach."""
    base = comparison.baseline.name
    by = {name: by_measure(comparison.arms, name) for name in DISTANCES}
    return {
        name: compare(arms, base)
        for name, arms in by.items()
        if arms and arms[0].name == base and len(arms) > 1
    }


def caveat(comparison: Comparison, others: Mapping[str, Comparison]) -> str:
    """By which measures the winner does not lead; empty without a winner or a second look."""
    if not comparison.winners or not others:
        return ""
    told = [_caveat(result.arm, comparison.baseline, others) for result in comparison.winners[:2]]
    return " ".join(told)


def _caveat(arm: Arm, base: Arm, others: Mapping[str, Comparison]) -> str:
    standings: dict[str, list[str]] = {}
    for name, other in others.items():
        standings.setdefault(_standing(arm.name, other), []).append(name)
    told = [f"{how} {_listed(standings[how])}" for how in _STANDINGS if how in standings]
    told += [f"ends with worse {_listed(lower)}"] if (lower := _worse(arm, base)) else []
    if not told:
        return f"{arm.name} {_FASTER} {_listed(standings[_FASTER])} as well."
    return f"{arm.name} {_listed(told)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _standing(name: str, other: Comparison) -> str:
    """Beside the baseline alone, so that further arms take nothing from what is shown of it."""
    arms = [arm for arm in other.arms if arm.name in (name, other.baseline.name)]
    if len(arms) < 2:
        return "is not measured by"
    comparison = compare(arms, other.baseline.name, other.target)
    (result,) = comparison.results
    if result.verdict in (Verdict.SLOWER, Verdict.WORSE):
        return "is slower by"
    if result not in comparison.faster:
        return "is not shown to be faster by"
    if _ends_higher(result, comparison):
        return "ends higher by"
    return "has seeds that fall short by" if comparison.falls_short(result) else _FASTER


def _ends_higher(result: Result, comparison: Comparison) -> bool:
    return result.arm.typical > comparison.baseline.typical


def _worse(arm: Arm, base: Arm) -> list[str]:
    """Shares of the last samples that are worse than the baseline's: Welch's test, Holm's p."""
    names = [name for name in FRACTIONS if _last(arm, name) and _last(base, name)]
    tests = [_test(_goodness(arm, name), _goodness(base, name)) for name in names]
    adjusted = holm([p for p, _ in tests])
    return [
        name
        for name, (_, difference), p in zip(names, tests, adjusted, strict=True)
        if difference < 0 and p is not None and p < 1 - CONFIDENCE
    ]


def _goodness(arm: Arm, name: str) -> list[float]:
    """Of each seed, more is better: memorized counts where it is more than of new images."""
    values = _last(arm, name)
    return values if name != "memorized" else [-max(value, _USUAL_SHARE) for value in values]


def _test(own: Sequence[float], usual: Sequence[float]) -> tuple[float | None, float]:
    """p and difference of the means; without any spread a difference is one."""
    if test := welch(own, usual):
        return test.p, test.difference
    difference = fmean(own) - fmean(usual)
    return (None if min(len(own), len(usual)) < 2 else float(difference == 0)), difference


def _last(arm: Arm, name: str) -> list[float]:
    """Of each seed; empty where one does not tell."""
    looks = [curve.looks[-1] if curve.looks else {} for curve in arm.curves]
    return [look[name] for look in looks] if all(name in look for look in looks) else []


def speed_table(others: Mapping[str, Comparison]) -> Table | None:
    """Speed-ups by each distance, to the lowest of it that all seeds of the baseline reach."""
    if not others:
        return None
    first = next(iter(others.values()))
    names = dict.fromkeys(arm.name for other in others.values() for arm in other.arms[1:])
    rows = [(name, *(_cell(name, other) for other in others.values())) for name in names]
    targets = ", ".join(f"{name} {fid_text(other.target)}" for name, other in others.items())
    caption = (
        f"Speed-ups over {first.baseline.name} by Frechet distances of the same samples, to the "
        f"lowest that all its seeds reach: {targets}. held-out is the FID beside held-out images; "
        "pixels and random-cnn, an untrained network, are beside the reference."
    )
    return Table(caption, ("arm", *others), tuple(rows), text_columns=tuple(others))


def _cell(name: str, other: Comparison) -> str:
    result = next((result for result in other.results if result.arm.name == name), None)
    if result is None:
        return "-"
    to = "" if result.at == other.target else f" to {fid_text(result.at)}"
    but = ""
    if result in other.faster and _ends_higher(result, other):
        but = ", but ends higher"
    elif result in other.faster and misses(result.crossings):
        but = f", {reached_text(result.crossings)} seeds reach {fid_text(other.target)}"
    return f"{speedup_text(result.speedup)}{to} {result.verdict.value}{but}"


def last_table(arms: Sequence[Arm]) -> Table | None:
    """What each arm's last samples score by every measure."""
    names = [name for name in (*DISTANCES, *FRACTIONS) if any(_last(arm, name) for arm in arms)]
    if not names:
        return None
    rows = []
    for arm in arms:
        others = (_mean(_last(arm, name)) for name in names)
        rows.append((arm.name, _mean([curve.fids[-1] for curve in arm.curves]), *others))
    floors_of = {name: [_last(arm, f"{name} floor") for arm in arms] for name in DISTANCES}
    real = {name: next(filter(None, found), []) for name, found in floors_of.items()}
    floors = ", ".join(
        f"{name} {fid_text(fmean(values))}" for name, values in real.items() if values
    )
    caption = (
        "The last samples of each arm, mean +- standard deviation over seeds; arms may have been "
        "trained for different numbers of steps. Real images in place of samples, or as many as "
        f"there are: {floors}. "
        "memorized: share of samples nearer to a training image than the median held-out image is."
    )
    return Table(caption, ("arm", "FID", *names), tuple(rows))


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return fid_text(fmean(values), stdev(values) if len(values) > 1 else None)
