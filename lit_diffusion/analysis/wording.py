"""What a comparison says, in words that a person reads once."""

import math
from collections.abc import Sequence

from lit_diffusion.analysis.comparison import (
    HEADLINE_SEEDS,
    Arm,
    Comparison,
    Result,
    Verdict,
    mean_crossing,
)
from lit_diffusion.analysis.curves import Bound, Crossing, sampling_spread
from lit_diffusion.analysis.speedup import Speedup

SURE = 0.001
"""A p-value below which a report speaks without reserve."""


def ratio_text(ratio: float) -> str:
    """A speed-up.

    Example:
        >>> ratio_text(2.1132), ratio_text(12.345)
        ('2.11x', '12.3x')
    """
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
    """A p-value; those below a thousandth are no number worth reading.

    Example:
        >>> p_text(0.0123), p_text(1e-9), p_text(None)
        ('0.012', '< 0.001', '-')
    """
    return "-" if p is None else "< 0.001" if p < SURE else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def seeds_text(count: int) -> str:
    """A number of seeds.

    Example:
        >>> seeds_text(1), seeds_text(5)
        ('1 seed', '5 seeds')
    """
    return f"{count} seed" if count == 1 else f"{count} seeds"


def verdict_text(result: Result, comparison: Comparison) -> str:
    """What the seeds say of an arm, in a line."""
    base = comparison.baseline
    count = _fewest(result, base)
    value = f"{speedup_text(result.speedup)}{_to(result, comparison)}"
    if result.verdict is Verdict.UNCLEAR:
        return f"unclear after correction for {comparison.num_tests} tests: {value}"
    if result.verdict is Verdict.NO_DIFFERENCE:
        return f"no difference that {seeds_text(count)} can show: {value}"
    if result.verdict is Verdict.UNKNOWN:
        return f"cannot be told from noise ({_why_unknown(result, base)}): {value}"
    if result.verdict is Verdict.MISSED:
        return f"does not get there: {_reached_the_target(result, comparison)}"
    provisional = f" (provisional: {seeds_text(count)})" if count < HEADLINE_SEEDS else ""
    wins_elsewhere = result.verdict is Verdict.FASTER and result.at != comparison.target
    but = f", but {_reached_the_target(result, comparison)}" * wins_elsewhere
    return f"{result.verdict.value} than {base.name}: {value}{but}{provisional}"


def reached_text(crossings: Sequence[Crossing]) -> str:
    """How many seeds reached the target.

    Example:
        >>> reached_text([Crossing(1000), Crossing(4000, Bound.MORE_THAN)])
        '1 of 2'
    """
    return f"{sum(c.bound is not Bound.MORE_THAN for c in crossings)} of {len(crossings)}"


def headline(comparison: Comparison) -> str:
    """Which arm won, and whether that is noise: the one sentence of a report."""
    base, best = comparison.baseline.name, comparison.best
    verdicts = {result.verdict for result in comparison.results}
    if best.verdict is Verdict.FASTER:
        at_least = "at least " * best.speedup.is_lower_bound
        gain = f"{at_least}{ratio_text(best.speedup.ratio)} as fast as {base}"
        certainty = _certainty([best], comparison)
        if best.at == comparison.target:
            return f"{best.arm.name} wins: {gain}. {certainty}"
        but = f"but {_reached_the_target(best, comparison)}"
        return f"{best.arm.name} is {gain}{_to(best, comparison)}, {but}. {certainty}"
    if verdicts == {Verdict.SLOWER}:
        certainty = _certainty(comparison.results, comparison)
        return f"{base} wins: {_all_others(comparison)} slower. {certainty}"
    if verdicts == {Verdict.MISSED}:
        return f"Only {base} reaches FID {fid_text(comparison.target)}."
    if verdicts == {Verdict.UNKNOWN}:
        return _looks(comparison)
    if best.verdict is Verdict.UNCLEAR and best.speedup.ratio > 1:
        count = comparison.num_tests
        return f"{best.arm.name} may beat {base}, but {count} arms were tested: it can be chance."
    return f"No arm beats {base} by more than noise."


def _looks(comparison: Comparison) -> str:
    """A headline without a test."""
    best = comparison.best
    ratio, ahead = best.speedup.ratio, best.speedup.ratio > 1
    if ratio == 1 or (best.speedup.is_upper_bound if ahead else best.speedup.is_lower_bound):
        return "These runs cannot tell which arm is best."
    looks = best.arm.name if ahead else comparison.baseline.name
    return f"{looks} looks best, but these runs cannot tell that from noise."


def explanation(comparison: Comparison) -> str:
    """What stands behind the headline, in a sentence or two."""
    base, best = comparison.baseline, comparison.best
    told = (
        f"FID {fid_text(comparison.target)} is reached {_when(comparison.crossings)} by "
        f"{base.name}, {_when(best.crossings)} by {best.arm.name}. "
        f"Speed-up{_to(best, comparison)} {speedup_text(best.speedup)}"
    )
    if best.speedup.low is not None:
        told += ", with its 95% interval"
    told += f"; {seeds_text(len(best.arm.curves))} against {len(base.curves)}."
    return " ".join([told, *_lead(comparison), *_noise_of_fid(comparison)])


def _when(crossings: Sequence[Crossing]) -> str:
    mean = mean_crossing(crossings)
    words = {
        Bound.EXACT: f"after {mean.step:,.0f} steps",
        Bound.AT_MOST: f"within {mean.step:,.0f} steps",
        Bound.MORE_THAN: f"with {reached_text(crossings)} seeds",
    }
    return words[mean.bound]


def by_images_text(comparison: Comparison, again: Comparison) -> str:
    """What becomes of the best arm where images are counted in place of steps.

    Args:
        comparison: by steps.
        again: of the same arms, by images.
    """
    name = comparison.best.arm.name
    result = next(result for result in again.results if result.arm.name == name)
    return f"By images seen, in place of steps, of {name}: {verdict_text(result, again)}."


def _lead(comparison: Comparison) -> list[str]:
    lead = comparison.lead
    if lead is None:
        return []
    second = comparison.faster[1].arm.name
    shown = lead.low is not None and lead.low > 1
    words = "more than noise" if shown else "within noise"
    return [f"Its lead over {second}, {speedup_text(lead)}, is {words}."]


def _noise_of_fid(comparison: Comparison) -> list[str]:
    spread = sampling_spread(curve for arm in comparison.arms for curve in arm.curves)
    if spread is None:
        return []
    return [f"From one set of samples to another, FID itself varies by {100 * spread.sd:.1f}%."]


def _reached_the_target(result: Result, comparison: Comparison) -> str:
    count, target = reached_text(result.crossings), fid_text(comparison.target)
    return f"{count} seeds reach FID {target}"


def _to(result: Result, comparison: Comparison) -> str:
    """Where a speed-up is measured, if that is not the target."""
    return f" to FID {fid_text(result.at)}" if result.at != comparison.target else ""


def _certainty(results: Sequence[Result], comparison: Comparison) -> str:
    """How sure verdicts are, by the least sure of them."""
    count = min(_fewest(result, comparison.baseline) for result in results)
    p = max(result.holm_p or 0.0 for result in results)
    if count < HEADLINE_SEEDS:
        return f"Hardly noise, but provisional: {seeds_text(count)}, not {HEADLINE_SEEDS}."
    return "That is not noise." if p < SURE else f"That is hardly noise (p = {p_text(p)})."


def _all_others(comparison: Comparison) -> str:
    names = [result.arm.name for result in comparison.results]
    several = "both" if len(names) == 2 else f"all {len(names)}"
    return f"{names[0]} is" if len(names) == 1 else f"{several} other arms are"


def _fewest(result: Result, base: Arm) -> int:
    return min(len(result.arm.curves), len(base.curves))


def _why_unknown(result: Result, base: Arm) -> str:
    if _fewest(result, base) < 2:
        return "one seed"
    if any(math.isinf(curve.best) for curve in result.arm.curves):
        return "a seed never had a finite FID"
    if result.speedup.is_lower_bound or result.speedup.is_upper_bound:
        return "the FID was reached before the first evaluation or never"
    return "the seeds do not differ at all"
