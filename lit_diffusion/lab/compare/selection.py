"""Which runs of an experiment may be compared, and why the others may not."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from lit_diffusion.lab.compare.arms import BASELINE
from lit_diffusion.lab.compare.found_runs import (
    Record,
    Run,
    error_of,
    is_fid,
    protocol_of,
    sampling_of,
    settings_that_differ,
)

_SHOWN = 6
_Difference = Callable[[Run, Run, str], str | None]


@dataclass(frozen=True)
class Selection:
    """Runs of equal protocol, by arm, with an FID of this name; run and reason of all others."""

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
        baseline: None is the arm called baseline, else the first.
        metric: None is the FID that most runs have.

    Raises:
        ValueError: where less than two arms are left, the baseline is not among them, seeds of an
            arm were configured differently, or one seed is there twice.
    """
    left_out: dict[Run, str] = {}
    sound = _kept(runs, left_out, lambda run: run.fault)
    if not sound:
        raise ValueError(f"none of these runs can be read. The first: {left_out[runs[0]]}.")
    fid = metric or usual_metric(sound)
    scored = _kept(sound, left_out, lambda run: _without(run, fid))
    if not scored:
        why = left_out[sound[0]]
        raise ValueError(f"none of these runs has a {fid} to compare. The first: {why}.")
    base = _baseline_of(scored, baseline)
    wanted = _usual([run for run in scored if run.arm == base], _other_protocol, fid)
    alike = _kept(scored, left_out, lambda run: _other_protocol(run, wanted, fid))
    usual = {arm: _usual(members, _other_sampling, fid) for arm, members in _by_arm(alike).items()}
    drawn = _kept(alike, left_out, lambda run: _other_sampling(run, usual[run.arm], fid))
    members = _by_arm(drawn)
    arms = _by_arm(_kept(drawn, left_out, lambda run: _cut_short(run, members[run.arm], fid)))
    told = [(str(run.path), why) for run, why in left_out.items()]
    if len(arms) < 2 or base not in arms:
        what = f"no run of the baseline {base} is" if len(arms) >= 2 else "no arm is"
        if len(arms) == 1:
            what = f"only the arm {next(iter(arms))} is"
        reasons = "".join(f"\n  {run}: {why}" for run, why in told[:_SHOWN])
        raise ValueError(
            f"a comparison needs a baseline and another arm, and {what} left.{reasons}"
        )
    for arm, found in arms.items():
        _refuse_unequal(arm, found)
    return Selection(fid, base, arms, told)


def _kept(
    runs: Iterable[Run], left_out: dict[Run, str], why_not: Callable[[Run], str | None]
) -> list[Run]:
    reasons = {run: why_not(run) for run in runs}
    left_out |= {run: why for run, why in reasons.items() if why}
    return [run for run, why in reasons.items() if not why]


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
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _baseline_of(runs: Sequence[Run], wanted: str | None) -> str:
    arms = list(dict.fromkeys(run.arm for run in runs))
    if wanted is not None and wanted not in arms:
        raise ValueError(
            f"there is no arm {wanted!r} with an FID for --baseline; there are {arms}."
        )
    return wanted or (BASELINE if BASELINE in arms else arms[0])


def _without(run: Run, metric: str) -> str | None:
    if error := error_of(lambda: run.points(metric)):
        return error
    if run.points(metric):
        return error_of(lambda: run.curve(metric))
    logged = [] if is_fid(metric) else [name for name in run.last_logged if "loss" in name]
    if others := _metrics(run) + logged:
        return f"it has no {metric}, but {', '.join(others)}"
    if run.diverged:
        return "its training diverged before its first FID, which flatters its arm"
    step, what = run.last_logged.get("step"), "FID" if is_fid(metric) else metric
    return f"it has no {what}" + (f"; metrics.csv ends at step {step}" if step else "")


def _usual(runs: Sequence[Run], difference: _Difference, metric: str) -> Run:
    """The first run from which the fewest differ."""
    return min(runs, key=lambda one: sum(difference(run, one, metric) is not None for run in runs))


def _other_protocol(run: Run, wanted: Run, metric: str) -> str | None:
    changed = _changes(*(protocol_of(each.points(metric)[-1]) for each in (run, wanted)))
    return changed and f"its FID is of another protocol than {wanted.path}'s: {changed}"


def _other_sampling(run: Run, usual: Run, metric: str) -> str | None:
    changed = _changes(*(sampling_of(each.points(metric)[-1]) for each in (run, usual)))
    return changed and f"its samples are drawn otherwise than those of {usual.path}: {changed}"


def _changes(own: Record, expected: Record) -> str | None:
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


def _refuse_unequal(arm: str, members: Sequence[Run]) -> None:
    for run, other in combinations(members, 2):
        if run.seed == other.seed:
            raise ValueError(
                f"arm {arm} holds seed {run.seed} twice: {run.path} and {other.path}. They would "
                "count as two; leave one out, or rename the folder of what is another arm."
            )
        if not (run.config and other.config):
            continue
        if changed := settings_that_differ(run.config, other.config):
            told = [f"{name} {old!r} and {new!r}" for name, (old, new) in changed.items()]
            more = f" and {len(told) - _SHOWN} more" * (len(told) > _SHOWN)
            raise ValueError(
                f"{run.path} and {other.path} are both of arm {arm} and differ in "
                f"{'; '.join(told[:_SHOWN])}{more}. Seeds of one arm must be configured alike; put "
                "them into folders named after arms of their own."
            )
