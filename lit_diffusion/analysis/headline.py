"""Which arm of a comparison won, whether that is noise, and what to hold against it."""

from collections.abc import Collection, Sequence

from lit_diffusion.analysis.comparison import (
    HEADLINE_SEEDS,
    Comparison,
    Result,
    Verdict,
    lead_over,
    mean_crossing,
)
from lit_diffusion.analysis.curves import Bound, Crossing, paired_spread, sampling_spread
from lit_diffusion.analysis.wording import (
    SURE,
    apart,
    but_text,
    fewest_seeds,
    fid_text,
    p_text,
    ratio_text,
    reached_text,
    seeds_text,
    shorter_text,
    speedup_text,
    to_text,
    why_unknown,
)

_LOSING = {Verdict.SLOWER: "slower", Verdict.WORSE: "worse at the end"}

UNEVEN = 1.2
"""Where the lowest FIDs of the baseline's seeds differ by a larger factor, a report says so."""


def headline(comparison: Comparison) -> str:
    """Which arm won, and whether that is noise: the one sentence of a report."""
    verdicts = {result.verdict for result in comparison.results}
    if comparison.faster:
        return _winner(comparison)
    if verdicts <= {*_LOSING, Verdict.MISSED}:
        return _baseline_wins(comparison)
    if not _tested(comparison):
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
    at, but = apart(best.at, comparison.target)[0], but_text(best, comparison)
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
    missed = [result.arm for result in comparison.results if result.verdict is Verdict.MISSED]
    is_longer = any(shorter_text(arm, comparison.baseline) for arm in missed)
    longer = ", but not all others were trained as long" * is_longer
    if verdicts == {Verdict.MISSED}:
        return f"Only {base} reaches FID {target}{longer}."
    how = " or ".join([*_losses(verdicts), *[f"never reach FID {target}"] * bool(missed)])
    certainty = _certainty(_tested(comparison), comparison)
    return f"{base} wins: {_all_others(comparison)} {how}{longer}. {certainty}"


def _tested(comparison: Comparison) -> list[Result]:
    """Arms with a test, of their speed or of their last FID."""
    return [r for r in comparison.results if r.holm_p is not None or r.end is not None]


def _losses(verdicts: Collection[Verdict]) -> list[str]:
    return [text for verdict, text in _LOSING.items() if verdict in verdicts]


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
    base, tested = comparison.baseline.name, _tested(comparison)
    for result in tested:
        if result.verdict is Verdict.UNCLEAR and result.speedup.ratio > 1:
            tests = f"{comparison.num_tests} arms were tested"
            return f"{result.arm.name} may beat {base}, but {tests}: it can be chance"
    if not any(result.verdict is Verdict.UNKNOWN for result in comparison.results):
        return f"No arm beats {base} by more than noise"
    how = " or ".join(_losses({result.verdict for result in tested}))
    loses, count = all(result.verdict in _LOSING for result in tested), len(tested)
    if count == 1:
        what = f"is {how} than {base}" if loses else f"does not beat {base} by more than noise"
        return f"{tested[0].arm.name}, the only arm tested, {what}"
    if loses:
        return f"{'Both' if count == 2 else f'All {count}'} arms tested are {how} than {base}"
    return f"None of the {count} arms tested beats {base} by more than noise"


def _untested(comparison: Comparison) -> list[str]:
    """How many arms cannot be told from noise, and which of them looks best."""
    unknown = [result for result in comparison.results if result.verdict is Verdict.UNKNOWN]
    if not unknown:
        return []
    reasons = {why_unknown(result, comparison.baseline) for result in unknown}
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
        f"Speed-up{to_text(best, comparison)} {speedup_text(best.speedup)}"
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
    is_ahead = best.speedup.ratio > 1 and not best.speedup.is_upper_bound
    if count == 1 or not is_ahead or best.verdict in (Verdict.WORSE, Verdict.MISSED):
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


def _lead(comparison: Comparison) -> list[str]:
    lead = comparison.lead
    if lead is None:
        return []
    first, next_one = comparison.faster[:2]
    second, value = next_one.arm.name, speedup_text(lead)
    if comparison.falls_short(next_one) and not comparison.falls_short(first):
        gain = f"{speedup_text(next_one.speedup)}{to_text(next_one, comparison)}"
        return [f"Next is {second}, {gain}, {but_text(next_one, comparison)}."]
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
