"""Which arm of a comparison won, whether that is noise, and what to hold against it."""

from collections.abc import Sequence

from lit_diffusion.lab.compare.comparison import (
    HEADLINE_SEEDS,
    Comparison,
    Result,
    Verdict,
    lead_over,
    mean_crossing,
)
from lit_diffusion.lab.compare.curves import Bound, Crossing, paired_spread, sampling_spread
from lit_diffusion.lab.compare.report.wording import (
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


def headline(comparison: Comparison) -> str:
    """Which arm won, and whether that is noise: the one sentence of a report."""
    verdicts = {result.verdict for result in comparison.results}
    if comparison.faster:
        return _faster(comparison)
    if verdicts <= {Verdict.SLOWER, Verdict.WORSE, Verdict.MISSED}:
        return _baseline_wins(comparison)
    return "; ".join([_undecided(comparison), *_untested(comparison)]) + "."


def winners_text(comparison: Comparison) -> str:
    """Who the headline begins with: the arms that win; empty where none does.

    Of many that cannot be told apart, two are named.
    """
    names = [result.arm.name for result in comparison.winners]
    if len(names) <= 2:
        return " and ".join(names)
    more = len(names) - 2
    return f"{names[0]}, {names[1]} and {'another' if more == 1 else f'{more} others'}"


def _faster(comparison: Comparison) -> str:
    base, best, winners = comparison.baseline.name, comparison.best, comparison.winners
    who, gains = winners_text(comparison), f"{_gains(winners or [best])} as fast"
    certainty = _certainty(winners or [best], comparison, "That" if winners else "The speed-up")
    if len(winners) > 1:
        tie = "Which is fastest cannot be told."
        return f"{who} beat {base}: {gains}. {certainty} {tie}"
    if winners:
        return f"{who} wins: {gains} as {base}. {certainty}"
    at, but = apart(best.at, comparison.target)[0], but_text(best, comparison)
    return f"No arm wins: {best.arm.name} is {gains} as {base} to FID {at}, {but}. {certainty}"


def _gains(results: Sequence[Result]) -> str:
    texts = dict.fromkeys(
        "at least " * result.speedup.is_lower_bound + ratio_text(result.speedup.ratio)
        for result in reversed(results)
    )
    first, *others = texts
    return f"{first} to {others[-1]}" if others else first


def _baseline_wins(comparison: Comparison) -> str:
    base, target = comparison.baseline, fid_text(comparison.target)
    losses = {
        Verdict.SLOWER: "slower",
        Verdict.WORSE: "worse at the end",
        Verdict.MISSED: f"short of FID {target}",
    }
    verdicts = {result.verdict for result in comparison.results}
    missed = [r.arm for r in comparison.results if r.verdict is Verdict.MISSED]
    longer = ", but not all others were trained as long" * any(
        shorter_text(arm, base) for arm in missed
    )
    if verdicts == {Verdict.MISSED}:
        return f"Only {base.name} reaches FID {target}{longer}."
    names = [result.arm.name for result in comparison.results]
    others = f"{names[0]} is" if len(names) == 1 else "the other arms are"
    how = " or ".join(text for verdict, text in losses.items() if verdict in verdicts)
    tested = [r for r in comparison.results if r.verdict is not Verdict.MISSED]
    certainty = _certainty(tested, comparison)
    return f"{base.name} wins: {others} {how}{longer}. {certainty}"


def _undecided(comparison: Comparison) -> str:
    base = comparison.baseline.name
    for result in comparison.results:
        if result.verdict is Verdict.UNCLEAR and result.speedup.ratio > 1:
            tests = f"{comparison.num_tests} arms were tested"
            return f"{result.arm.name} may beat {base}, but {tests}: it can be chance"
    return f"No arm is shown to beat {base} by more than noise"


def _untested(comparison: Comparison) -> list[str]:
    """Which arms cannot be told from noise, and which of them looks best."""
    unknown = [result for result in comparison.results if result.verdict is Verdict.UNKNOWN]
    if not unknown:
        return []
    reasons = {why_unknown(result, comparison.baseline) for result in unknown}
    why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
    ahead = [
        result.arm.name
        for result in unknown
        if _is_ahead(result) and not comparison.falls_short(result)
    ]
    who, best = f"{len(unknown)} arms", f", of which {ahead[0]} looks best" if ahead else ""
    if len(unknown) == 1:
        who, best = unknown[0].arm.name, ", but looks faster" * len(ahead)
    return [f"{who} cannot be told from noise{why}{best}"]


def _is_ahead(result: Result) -> bool:
    return result.speedup.ratio > 1 and not result.speedup.is_upper_bound


def basis(comparison: Comparison) -> str:
    """The numbers of the headline."""
    base, best = comparison.baseline, comparison.best
    told = (
        f"FID {fid_text(comparison.target)} is reached {_when(comparison.crossings)} by "
        f"{base.name}, {_when(best.crossings)} by {best.arm.name}. "
        f"Speed-up{to_text(best, comparison)} {speedup_text(best.speedup)}"
    )
    interval = ", with its 95% interval" * (best.speedup.low is not None)
    return f"{told}{interval}; {seeds_text(len(best.arm.curves))} against {len(base.curves)}."


def doubts(comparison: Comparison) -> str:
    """What to hold against the headline; empty where there is nothing."""
    told = [*_picked(comparison), *_lead(comparison), *_uneven(comparison)]
    if comparison.faster:  # else the headline says so
        told += [f"{text}." for text in _untested(comparison)]
    return " ".join([*told, *_noise_of_fid(comparison)])


def _picked(comparison: Comparison) -> list[str]:
    """That the best of several arms owes something to luck, which no interval here allows for."""
    count, best = len(comparison.results), comparison.best
    if count == 1 or not _is_ahead(best) or best.verdict in (Verdict.WORSE, Verdict.MISSED):
        return []
    beyond = "" if best.speedup.low is None else ", which its interval does not allow for"
    name = best.arm.name
    return [f"Picked as the best of {count} arms{beyond}: expect less of {name} on fresh seeds."]


def _uneven(comparison: Comparison) -> list[str]:
    """Which seed of the baseline makes the target an easy one, by more than 20%."""
    base = comparison.baseline
    worst, best = (choose(base.curves, key=lambda curve: curve.best) for choose in (max, min))
    if worst.best != comparison.target or worst.best <= 1.2 * best.best:
        return []
    return [
        f"Seeds of {base.name} differ: seed {worst.seed} sets the target, the median seed reaches "
        f"FID {fid_text(base.typical)}, the best {fid_text(best.best)}."
    ]


def _when(crossings: Sequence[Crossing]) -> str:
    mean = mean_crossing(crossings)
    if mean.bound in (Bound.MORE_THAN, Bound.UNKNOWN):
        return f"with {reached_text(crossings)} seeds"
    return f"{'after' if mean.bound is Bound.EXACT else 'within'} {mean.step:,.0f} steps"


def _lead(comparison: Comparison) -> list[str]:
    if len(comparison.faster) < 2:
        return []
    first, second = comparison.faster[:2]
    name, lead = second.arm.name, lead_over(first, second)
    if comparison.falls_short(second) and not comparison.falls_short(first):
        gain = f"{speedup_text(second.speedup)}{to_text(second, comparison)}"
        return [f"Next is {name}, {gain}, {but_text(second, comparison)}."]
    if lead.low is None:
        return [f"Its lead over {name} cannot be told."]
    noise = "more than noise" if lead.low > 1 else "within noise"
    return [f"Its lead over {name}, {speedup_text(lead)}, is {noise}."]


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
    count = min(fewest_seeds(result, comparison.baseline) for result in results)
    p = max(result.sure for result in results)
    if count < HEADLINE_SEEDS:
        return f"Hardly noise, but provisional: {seeds_text(count)}, not {HEADLINE_SEEDS}."
    sure = "not noise" if p < SURE else f"hardly noise (p = {p_text(p)})"
    return f"{subject} is {sure}."
