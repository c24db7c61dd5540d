"""What a comparison says, in words that a person reads once."""

import math
from collections.abc import Sequence

from lit_diffusion.analysis.comparison import (
    HEADLINE_SEEDS,
    Arm,
    Comparison,
    Result,
    Verdict,
    lead_over,
    mean_crossing,
)
from lit_diffusion.analysis.curves import Bound, Crossing, paired_spread, sampling_spread
from lit_diffusion.analysis.speedup import Speedup

SURE = 0.001
"""A p-value below which a report speaks without reserve."""

_LOSING = (Verdict.SLOWER, Verdict.WORSE)

UNEVEN = 1.2
"""Where the lowest FIDs of the baseline's seeds differ by a larger factor, a report says so."""


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
    count = fewest_seeds(result, base)
    value = f"{speedup_text(result.speedup)}{_to(result, comparison)}"
    if result.verdict is Verdict.UNCLEAR:
        return f"unclear after correction for {comparison.num_tests} tests: {value}"
    if result.verdict is Verdict.NO_DIFFERENCE:
        return f"no difference that {seeds_text(count)} can show: {value}"
    if result.verdict is Verdict.UNKNOWN:
        return f"cannot be told from noise ({_why_unknown(result, base)}): {value}"
    if result.verdict is Verdict.MISSED:
        return f"does not get there: {_reached_the_target(result, comparison)}"
    if result.verdict is Verdict.LOST:
        return f"not finite at the end: {value}, {_but(result, comparison)}"
    provisional = f" (provisional: {seeds_text(count)})" if count < HEADLINE_SEEDS else ""
    if result.end is not None:
        fids = f"FID {fid_text(result.end.fid)}, not {fid_text(result.end.baseline)}"
        return f"ends worse than {base.name}: {fids}{provisional}"
    falls_short = result.verdict is Verdict.FASTER and comparison.falls_short(result)
    but = f", {_but(result, comparison)}" if falls_short else ""
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
    verdicts = {result.verdict for result in comparison.results}
    if comparison.faster:
        return _winner(comparison)
    if verdicts <= {*_LOSING, Verdict.MISSED}:
        return _baseline_wins(comparison)
    if comparison.num_tests == 0:
        return _looks(comparison)
    return "; ".join([_of_the_tested(comparison), *_untested(comparison)]) + "."


def winners_text(comparison: Comparison) -> str:
    """Who the headline begins with: the arms that win; empty where none does.

    Of many that cannot be told apart, two are named.
    """
    names = [result.arm.name for result in comparison.winners]
    if len(names) <= 2:
        return " and ".join(names)
    more = len(names) - 2
    return f"{names[0]}, {names[1]} and {'another' if more == 1 else f'{more} others'}"


def _winner(comparison: Comparison) -> str:
    """A headline on arms that are faster; one that falls short does not win."""
    base, best = comparison.baseline.name, comparison.best
    winners, who = comparison.winners, winners_text(comparison)
    if len(winners) > 1:
        certainty = _certainty(winners, comparison)
        return f"{who} beat {base}: {_gains(winners)} as fast. {certainty} {_tie(winners)}"
    gain = f"{_gains([best])} as fast as {base}"
    if winners:
        return f"{who} wins: {gain}. {_certainty(winners, comparison)}"
    certainty = _certainty([best], comparison, "The speed-up")
    at, but = _target_texts(best.at, comparison)[0], _but(best, comparison)
    return f"No arm wins: {best.arm.name} is {gain} to FID {at}, {but}. {certainty}"


def _gains(results: Sequence[Result]) -> str:
    """Their speed-ups, from the lowest to the highest."""
    texts = dict.fromkeys(
        "at least " * result.speedup.is_lower_bound + ratio_text(result.speedup.ratio)
        for result in reversed(results)
    )
    first, *others = texts
    return f"{first} to {others[-1]}" if others else first


def _tie(winners: Sequence[Result]) -> str:
    """That the first does not lead the others by more than noise."""
    if any(lead_over(winners[0], other).low is None for other in winners[1:]):
        return "Which of them is fastest cannot be told."
    return "Between them it is noise."


def _baseline_wins(comparison: Comparison) -> str:
    """A headline where every arm is slower or never gets there."""
    base, target = comparison.baseline.name, fid_text(comparison.target)
    verdicts = {result.verdict for result in comparison.results}
    if verdicts == {Verdict.MISSED}:
        others = [result.arm for result in comparison.results]
        is_longer = any(_shorter(arm, comparison.baseline) for arm in others)
        longer = ", but not all others were trained as long" * is_longer
        return f"Only {base} reaches FID {target}{longer}."
    if Verdict.MISSED in verdicts:
        how = f"slower or never reach FID {target}"
    else:
        words = {Verdict.SLOWER: "slower", Verdict.WORSE: "worse at the end"}
        how = " or ".join(text for verdict, text in words.items() if verdict in verdicts)
    certainty = _certainty(comparison.results, comparison)
    return f"{base} wins: {_all_others(comparison)} {how}. {certainty}"


def _looks(comparison: Comparison) -> str:
    """A headline without a test."""
    best, speedup = comparison.best, comparison.best.speedup
    if _looks_faster(best, comparison):
        looks = best.arm.name
    elif speedup.ratio < 1 and not speedup.is_lower_bound:
        looks = comparison.baseline.name
    else:
        return "These runs cannot tell which arm is best."
    return f"{looks} looks best, but these runs cannot tell that from noise."


def _of_the_tested(comparison: Comparison) -> str:
    """That none of the arms with a test wins; nothing is claimed of the others."""
    base, count = comparison.baseline.name, comparison.num_tests
    tested = [result for result in comparison.results if result.holm_p is not None]
    for result in tested:
        if result.verdict is Verdict.UNCLEAR and result.speedup.ratio > 1:
            name = result.arm.name
            return f"{name} may beat {base}, but {count} arms were tested: it can be chance"
    if not any(result.verdict is Verdict.UNKNOWN for result in comparison.results):
        return f"No arm beats {base} by more than noise"
    slower = all(result.verdict in _LOSING for result in tested)
    if count == 1:
        what = f"is slower than {base}" if slower else f"does not beat {base} by more than noise"
        return f"{tested[0].arm.name}, the only arm tested, {what}"
    if slower:
        return f"{'Both' if count == 2 else f'All {count}'} arms tested are slower than {base}"
    return f"None of the {count} arms tested beats {base} by more than noise"


def _untested(comparison: Comparison) -> list[str]:
    """How many arms cannot be told from noise, and which of them looks best."""
    unknown = [result for result in comparison.results if result.verdict is Verdict.UNKNOWN]
    if not unknown:
        return []
    reasons = {_why_unknown(result, comparison.baseline) for result in unknown}
    why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
    told = f"cannot be told from noise{why}"
    ahead = [result.arm.name for result in unknown if _looks_faster(result, comparison)]
    if len(unknown) == 1:
        return [f"{unknown[0].arm.name} {told}{', but looks faster' * len(ahead)}"]
    return [
        f"{len(unknown)} others {told}" + (f", of which {ahead[0]} looks best" if ahead else "")
    ]


def _looks_faster(result: Result, comparison: Comparison) -> bool:
    found = result.speedup
    return found.ratio > 1 and not found.is_upper_bound and not comparison.falls_short(result)


def explanation(comparison: Comparison) -> str:
    """What stands behind the headline, in a few sentences: `basis`, then `doubts`."""
    return " ".join(text for text in (basis(comparison), doubts(comparison)) if text)


def basis(comparison: Comparison) -> str:
    """The numbers of the headline."""
    base, best = comparison.baseline, comparison.best
    told = (
        f"FID {fid_text(comparison.target)} is reached {_when(comparison.crossings)} by "
        f"{base.name}, {_when(best.crossings)} by {best.arm.name}. "
        f"Speed-up{_to(best, comparison)} {speedup_text(best.speedup)}"
    )
    if best.speedup.low is not None:
        told += ", with its 95% interval"
    return f"{told}; {seeds_text(len(best.arm.curves))} against {len(base.curves)}."


def doubts(comparison: Comparison) -> str:
    """What to hold against the headline; empty where there is nothing."""
    told = [*_picked(comparison), *_lead(comparison), *_uneven(comparison)]
    if comparison.faster:  # else the headline tells
        told += [f"{text}." for text in _untested(comparison)]
    return " ".join([*told, *_noise_of_fid(comparison)])


def _picked(comparison: Comparison) -> list[str]:
    """That the best of several arms owes something to luck, which no interval here allows for."""
    count, best = len(comparison.results), comparison.best
    if count == 1 or best.speedup.ratio <= 1:
        return []
    beyond = "" if best.speedup.low is None else ", which its interval does not allow for"
    name = best.arm.name
    return [f"Picked as the best of {count} arms{beyond}: expect less of {name} on fresh seeds."]


def _uneven(comparison: Comparison) -> list[str]:
    """Which seed of the baseline makes the target an easy one."""
    base = comparison.baseline
    worst, best = (choose(base.curves, key=lambda curve: curve.best) for choose in (max, min))
    if worst.best != comparison.target or worst.best <= UNEVEN * best.best:
        return []
    return [
        f"Seeds of {base.name} differ: seed {worst.seed} sets the target, the median seed reaches "
        f"FID {fid_text(base.typical)}, the best {fid_text(best.best)}."
    ]


def _when(crossings: Sequence[Crossing]) -> str:
    mean = mean_crossing(crossings)
    words = {
        Bound.EXACT: f"after {mean.step:,.0f} steps",
        Bound.AT_MOST: f"within {mean.step:,.0f} steps",
        Bound.MORE_THAN: f"with {reached_text(crossings)} seeds",
        Bound.UNKNOWN: f"with {reached_text(crossings)} seeds",
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
    first, next_one = comparison.faster[:2]
    second, value = next_one.arm.name, speedup_text(lead)
    if comparison.falls_short(next_one) and not comparison.falls_short(first):
        gain = f"{speedup_text(next_one.speedup)}{_to(next_one, comparison)}"
        return [f"Next is {second}, {gain}, {_but(next_one, comparison)}."]
    if lead.low is None:
        known = "" if value == "unknown" else f", {value},"
        return [f"Its lead over {second}{known} cannot be told{' from noise' * bool(known)}."]
    words = "more than noise" if lead.low > 1 else "within noise"
    return [f"Its lead over {second}, {value}, is {words}."]


def _noise_of_fid(comparison: Comparison) -> list[str]:
    curves = [curve for arm in comparison.arms for curve in arm.curves]
    spread, paired = sampling_spread(curves), paired_spread(curves)
    if spread is None:
        return []
    told = f"From one set of samples to another, FID itself varies by {100 * spread.sd:.1f}%"
    if paired is not None:
        told += f"; beside other runs on the same set, by {100 * paired.sd:.1f}%"
    return [f"{told}."]


def _but(result: Result, comparison: Comparison) -> str:
    """Why an arm that is faster does not win."""
    arm, base = result.arm, comparison.baseline
    why = []
    if any(crossing.bound is Bound.MORE_THAN for crossing in result.crossings):
        why.append(_reached_the_target(result, comparison))
    if arm.lost:
        those = f" ({base.name}: {base.lost} of {len(base.curves)})" * (base.lost > 0)
        why.append(f"{arm.lost} of {len(arm.curves)} seeds end without a finite FID{those}")
    if not why:
        medians = f"{fid_text(arm.typical)}, that of {base.name} {fid_text(base.typical)} (medians)"
        why.append(f"its lowest FID is {medians}{_shorter(arm, base)}")
    return f"but {' and '.join(why)}"


def _reached_the_target(result: Result, comparison: Comparison) -> str:
    """How many seeds did, and what would be unfair to leave out."""
    base = comparison.baseline
    told = f"{reached_text(result.crossings)} seeds reach FID {fid_text(comparison.target)}"
    if any(crossing.bound is Bound.MORE_THAN for crossing in comparison.crossings):
        told += f" ({base.name}: {reached_text(comparison.crossings)})"
    return told + _shorter(result.arm, base)


def _shorter(arm: Arm, base: Arm) -> str:
    """By how much an arm was trained less than the baseline; empty where it was not."""
    own, full = (max(curve.steps[-1] for curve in a.curves) for a in (arm, base))
    return f", trained {100 * own / full:.0f}% as long as {base.name}" * (own < 0.99 * full)


def _to(result: Result, comparison: Comparison) -> str:
    """Where a speed-up is measured, if that is not the target."""
    return f" to FID {at_text(result, comparison)}" if result.at != comparison.target else ""


def at_text(result: Result, comparison: Comparison) -> str:
    """The FID that a speed-up is measured at; beside the target where those look alike."""
    at, target = _target_texts(result.at, comparison)
    return f"{at}, not {target}" if fid_text(result.at) != at else at


def _target_texts(at: float, comparison: Comparison) -> tuple[str, str]:
    """An FID and the target, with as many digits as tell them apart."""
    target = comparison.target
    texts, places = (fid_text(at), fid_text(target)), 3
    while texts[0] == texts[1] and at != target and places < 12:
        places += 1
        texts = f"{at:.{places}f}", f"{target:.{places}f}"
    return texts


def _certainty(results: Sequence[Result], comparison: Comparison, subject: str = "That") -> str:
    """How sure verdicts are, by the least sure of them."""
    count = min(fewest_seeds(result, comparison.baseline) for result in results)
    p = max(result.sure for result in results)
    if count < HEADLINE_SEEDS:
        return f"Hardly noise, but provisional: {seeds_text(count)}, not {HEADLINE_SEEDS}."
    return (
        f"{subject} is not noise." if p < SURE else f"{subject} is hardly noise (p = {p_text(p)})."
    )


def _all_others(comparison: Comparison) -> str:
    names = [result.arm.name for result in comparison.results]
    several = "both" if len(names) == 2 else f"all {len(names)}"
    return f"{names[0]} is" if len(names) == 1 else f"{several} other arms are"


def fewest_seeds(result: Result, base: Arm) -> int:
    """Of an arm and the baseline; with less than `HEADLINE_SEEDS` a verdict is provisional."""
    return min(len(result.arm.curves), len(base.curves))


def _why_unknown(result: Result, base: Arm) -> str:
    if fewest_seeds(result, base) < 2:
        return "one seed"
    if any(math.isinf(curve.best) for curve in result.arm.curves):
        return "a seed never had a finite FID"
    if result.speedup.is_lower_bound or result.speedup.is_upper_bound:
        return "the FID was reached before the first evaluation or never"
    return "the seeds do not differ at all"
