"""Whether an arm that wins by FID wins by other measures of the same samples."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from lit_diffusion.experiments.comparison import Arm, Comparison, Result, by_measure, compare
from lit_diffusion.experiments.report.tables import Table
from lit_diffusion.experiments.report.wording import fid_text, speedup_text
from lit_diffusion.experiments.speedup import CONFIDENCE, welch
from lit_diffusion.metrics.second_look import DISTANCES, SHARES

_LOWER_IS_BETTER = ("memorized",)


def look_again(comparison: Comparison) -> dict[str, Comparison]:
    """The comparison by other distances, to the lowest that all seeds of the baseline reach."""
    by = {name: by_measure(comparison.arms, name) for name in DISTANCES}
    return {name: compare(arms, comparison.baseline.name) for name, arms in by.items() if arms}


def caveat(comparison: Comparison, others: Mapping[str, Comparison]) -> str:
    """By which measures the winner does not lead; empty without a winner or a second look."""
    if not comparison.winners or not others:
        return ""
    told = [_caveat(result.arm, comparison.baseline, others) for result in comparison.winners[:2]]
    return " ".join(told)


def _caveat(arm: Arm, base: Arm, others: Mapping[str, Comparison]) -> str:
    behind = [name for name, other in others.items() if not _leads(arm.name, other)]
    lower = [name for name in SHARES if _is_worse(arm, base, name)]
    told = [f"does not lead by {_listed(behind)}"] if behind else []
    told += [f"is worse in {_listed(lower)}"] if lower else []
    if not told:
        return f"{arm.name} leads by {_listed(list(others))} as well."
    return f"{arm.name} {' and '.join(told)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _leads(arm: str, other: Comparison) -> bool:
    result = _result(arm, other)
    return result in other.faster and not other.falls_short(result)


def _result(arm: str, other: Comparison) -> Result:
    return next(result for result in other.results if result.arm.name == arm)


def _is_worse(arm: Arm, base: Arm, name: str) -> bool:
    """Whether a share of the last samples is worse than the baseline's, by Welch's test alone."""
    own, usual = _last(arm, name), _last(base, name)
    test = welch(own, usual) if own and usual else None
    if test is None or test.p >= 1 - CONFIDENCE:
        return False
    return (test.difference > 0) == (name in _LOWER_IS_BETTER)


def _last(arm: Arm, name: str) -> list[float]:
    """Of each seed; empty where one does not tell."""
    looks = [curve.looks[-1] if curve.looks else {} for curve in arm.curves]
    return [look[name] for look in looks] if all(name in look for look in looks) else []


def speed_table(others: Mapping[str, Comparison]) -> Table | None:
    """Speed-ups by each distance, to the lowest of it that all seeds of the baseline reach."""
    if not others:
        return None
    first = next(iter(others.values()))
    rows = [
        (arm.name, *(_cell(_result(arm.name, other), other) for other in others.values()))
        for arm in first.arms[1:]
    ]
    targets = ", ".join(f"{name} {fid_text(other.target)}" for name, other in others.items())
    caption = (
        f"Speed-ups over {first.baseline.name} by Frechet distances of the same samples, to the "
        f"lowest that all its seeds reach: {targets}. held-out is the FID beside held-out images; "
        "pixels and random-cnn, an untrained network, are beside the reference."
    )
    return Table(caption, ("arm", *others), tuple(rows), text_columns=tuple(others))


def _cell(result: Result, other: Comparison) -> str:
    short = result in other.faster and other.falls_short(result)
    to = "" if result.at == other.target else f" to {fid_text(result.at)}"
    but = ", but ends higher" * short
    return f"{speedup_text(result.speedup)}{to} {result.verdict.value}{but}"


def last_table(arms: Sequence[Arm]) -> Table | None:
    """What each arm's last samples score by every measure."""
    names = [name for name in (*DISTANCES, *SHARES) if all(_last(arm, name) for arm in arms)]
    if not names:
        return None
    rows = []
    for arm in arms:
        others = (_mean(_last(arm, name)) for name in names)
        rows.append((arm.name, _mean([curve.fids[-1] for curve in arm.curves]), *others))
    real = {name: _last(arms[0], f"{name} floor") for name in names if name in DISTANCES}
    floors = ", ".join(
        f"{name} {fid_text(fmean(values))}" for name, values in real.items() if values
    )
    caption = (
        "The last samples of each arm, mean +- standard deviation over seeds; arms may have been "
        f"trained for different numbers of steps. Real images in place of samples: {floors}. "
        "memorized: share of samples nearer to a training image than the median held-out image is."
    )
    return Table(caption, ("arm", "FID", *names), tuple(rows))


def _mean(values: Sequence[float]) -> str:
    return fid_text(fmean(values), stdev(values) if len(values) > 1 else None)
