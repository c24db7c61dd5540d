"""Numbers and verdicts of a comparison, in words that a person reads once."""

import math
import re
from collections.abc import Sequence

from lit_diffusion.lab.compare.comparison import (
    HEADLINE_SEEDS,
    Arm,
    Comparison,
    Result,
    Verdict,
    misses,
)
from lit_diffusion.lab.compare.curves import Bound, Crossing
from lit_diffusion.lab.compare.speedup import Speedup

SURE = 0.001
"""A p-value below which a report speaks without reserve."""


def of_score(text: str, score: str) -> str:
    """A text on FIDs as one on another score.

    Example:
        >>> of_score("An FID of 2; FIDs", "loss")
        'A loss of 2; losses'
    """
    if score == "FID":
        return text
    many = f"{score}{'es' if score.endswith('s') else 's'}"
    text = re.sub(r"\b([Aa])n FID\b", rf"\1 {score}", text)
    text = re.sub(r"\bFIDs\b", many, text)
    return re.sub(r"(?<![-\w])FID(?![-\w])", score, text)  # no part of an arm's name


def ratio_text(ratio: float) -> str:
    """A speed-up to three digits, such as 2.11x and 12.3x."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.3g}x"


def speedup_text(speedup: Speedup) -> str:
    """A speed-up with its interval.

    Example:
        >>> speedup_text(Speedup(1.8, 1.5, 2.2, 0.01))
        '1.80x [1.50, 2.20]'
        >>> speedup_text(Speedup(1.8, 1.5, float("inf"), 0.01, is_lower_bound=True))
        'at least 1.80x [1.50, -]'
    """
    if speedup.is_lower_bound and speedup.is_upper_bound:
        return "unknown"
    bound = "at least " * speedup.is_lower_bound + "at most " * speedup.is_upper_bound
    text = f"{bound}{ratio_text(speedup.ratio)}"
    if speedup.low is None or speedup.high is None:
        return text
    low = "-" if speedup.low == 0 else ratio_text(speedup.low)[:-1]
    high = "-" if math.isinf(speedup.high) else ratio_text(speedup.high)[:-1]
    return f"{text} [{low}, {high}]"


def fid_text(fid: float, sd: float | None = None) -> str:
    """An FID, to three or four digits, and its standard deviation to as many places.

    Example:
        >>> fid_text(0.40734), fid_text(6.04, 0.1234), fid_text(123.4)
        ('0.407', '6.04 +- 0.12', '123.4')
    """
    if not math.isfinite(fid):
        return "not finite"
    places = 3 if fid < 1 else 2 if fid < 100 else 1
    return f"{fid:.{places}f}" + ("" if sd is None else f" +- {sd:.{places}f}")


def p_text(p: float | None) -> str:
    """A p-value; those below a thousandth are no number worth reading."""
    return "-" if p is None else "< 0.001" if p < SURE else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def seeds_text(count: int) -> str:
    """1 seed, 2 seeds, ..."""
    return f"{count} seed" if count == 1 else f"{count} seeds"


def verdict_text(result: Result, comparison: Comparison) -> str:
    """What the seeds say of an arm, in a line."""
    base, verdict = comparison.baseline, result.verdict
    count = fewest_seeds(result, base)
    if verdict is Verdict.MISSED:
        return f"does not get there: {_reached_the_target(result, comparison)}"
    told = {
        Verdict.LOST: "not finite at the end",
        Verdict.UNCLEAR: f"unclear after correction for {comparison.num_tests} tests",
        Verdict.NO_DIFFERENCE: f"no difference that {seeds_text(count)} can show",
        Verdict.UNKNOWN: f"cannot be told from noise ({why_unknown(result, base)})",
        Verdict.WORSE: f"ends worse than {base.name}{_fids(result, comparison)}",
    }.get(verdict, f"{verdict.value} than {base.name}")
    told += f": {speedup_text(result.speedup)}{to_text(result, comparison)}"
    if verdict in (Verdict.FASTER, Verdict.LOST) and comparison.falls_short(result):
        told += f", {but_text(result, comparison)}"
    elif result.arm.lost:
        told += f", but {_lost(result, base)}"
    is_claim = verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.WORSE)
    is_provisional = is_claim and count < HEADLINE_SEEDS
    return told + f" (provisional: {seeds_text(count)})" * is_provisional


def _fids(result: Result, comparison: Comparison) -> str:
    end = result.end
    if end is None:
        return ""
    own, other = apart(end.fid, end.baseline)
    p = p_text(end.p) if end.p < SURE else f"= {p_text(end.p)}"
    arms = len(comparison.results)
    corrected = f", corrected for {arms} arms" * (arms > 1)
    return f": FID {own} against {other} (p {p}{corrected}); by steps"


def reached_text(crossings: Sequence[Crossing]) -> str:
    """How many seeds reached the target, such as 1 of 2."""
    return f"{sum(c.bound is not Bound.MORE_THAN for c in crossings)} of {len(crossings)}"


def by_images_text(comparison: Comparison, again: Comparison) -> str:
    """What becomes of the best arm where images are counted in place of steps."""
    name = comparison.best.arm.name
    result = next(result for result in again.results if result.arm.name == name)
    return f"By images seen, in place of steps, of {name}: {verdict_text(result, again)}."


def but_text(result: Result, comparison: Comparison) -> str:
    """Why an arm that is faster does not win."""
    arm, base = result.arm, comparison.baseline
    why = []
    if misses(result.crossings):
        why.append(_reached_the_target(result, comparison))
    if arm.lost:
        why.append(_lost(result, base))
    if not why:
        medians = f"{fid_text(arm.typical)}, that of {base.name} {fid_text(base.typical)} (medians)"
        why.append(f"its lowest FID is {medians}{shorter_text(arm, base)}")
    return f"but {' and '.join(why)}"


def _lost(result: Result, base: Arm) -> str:
    arm = result.arm
    those = f" ({base.name}: {base.lost} of {len(base.curves)})" * (base.lost > 0)
    return f"{arm.lost} of {len(arm.curves)} seeds end without a finite FID{those}"


def _reached_the_target(result: Result, comparison: Comparison) -> str:
    base = comparison.baseline
    told = f"{reached_text(result.crossings)} seeds reach FID {fid_text(comparison.target)}"
    if misses(comparison.crossings):
        told += f" ({base.name}: {reached_text(comparison.crossings)})"
    return told + shorter_text(result.arm, base)


def shorter_text(arm: Arm, base: Arm) -> str:
    """By how much an arm was trained less than the baseline; empty where it was not."""
    own, full = (max(curve.steps[-1] for curve in a.curves) for a in (arm, base))
    return f", trained {100 * own / full:.0f}% as long as {base.name}" * (own < 0.99 * full)


def to_text(result: Result, comparison: Comparison) -> str:
    """Where a speed-up is measured, if not at the target; beside that where those look alike."""
    if result.at == comparison.target:
        return ""
    at, target = apart(result.at, comparison.target)
    return f" to FID {at}" + f", not {target}" * (fid_text(result.at) != at)


def apart(first: float, second: float) -> tuple[str, str]:
    """Two FIDs, with as many digits as tell them apart.

    Example:
        >>> apart(0.26913, 0.26935), apart(0.26913, 0.26914)
        (('0.2691', '0.2693'), ('0.26913', '0.26914'))
    """
    texts, places = (fid_text(first), fid_text(second)), 3
    while texts[0] == texts[1] and first != second and places < 12:
        places += 1
        texts = f"{first:.{places}f}", f"{second:.{places}f}"
    return texts


def fewest_seeds(result: Result, base: Arm) -> int:
    """Of an arm and the baseline; with less than `HEADLINE_SEEDS` a verdict is provisional."""
    return min(len(result.arm.curves), len(base.curves))


def why_unknown(result: Result, base: Arm) -> str:
    """Why an arm has no test."""
    if fewest_seeds(result, base) < 2:
        return "one seed"
    if any(math.isinf(curve.best) for curve in result.arm.curves):
        return "a seed never had a finite FID"
    if result.speedup.is_lower_bound or result.speedup.is_upper_bound:
        return "the FID was reached before the first evaluation or never"
    return "the seeds do not differ at all"
