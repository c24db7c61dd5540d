"""From run folders, or CSV files, to the report on them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from lit_diffusion.lab.compare import ema_widths, findings
from lit_diffusion.lab.compare.arms import BASELINE
from lit_diffusion.lab.compare.comparison import Arm, by_images, compare
from lit_diffusion.lab.compare.curve_tables import read_arms
from lit_diffusion.lab.compare.found_runs import find_runs, is_fid
from lit_diffusion.lab.compare.report.report import Report
from lit_diffusion.lab.compare.report.second_look import look_again
from lit_diffusion.lab.compare.selection import select

T = TypeVar("T")


def report_on_tables(
    files: Sequence[str],
    baseline: str | None,
    target: float | None,
    only: Sequence[str] | None = None,
) -> Report:
    """The report on CSV files; for their format see `read_arms`, for the rest `report_on_runs`."""
    arms = _wanted(read_arms(files), lambda arm: arm.name, only)
    names = [arm.name for arm in arms]
    note = "The numbers are from CSV files; how the FIDs were measured is not known."
    baseline = baseline or (BASELINE if BASELINE in names else names[0])
    return replace(_report(arms, baseline, target), notes=[note])


def report_on_runs(
    folders: Sequence[str],
    baseline: str | None,
    target: float | None,
    metric: str | None,
    only: Sequence[str] | None = None,
) -> Report:
    """The report on run folders; for the options see `lit-diffusion compare --help`.

    Raises:
        ValueError: for runs that cannot be compared.
    """
    runs = _wanted(find_runs(folders), lambda run: run.arm, only)
    selection = select(runs, baseline, metric)
    arms = findings.arms_of(selection)
    report = _report(arms, selection.baseline, target)
    samples = findings.sample_pictures(selection, [arm.name for arm in report.comparison.arms])
    widths, told = ema_widths.judge(selection)
    name, other = selection.metric, not is_fid(selection.metric)
    of_objective = f"Lower is taken for better; a loss, as {name}, compares arms of one objective."
    return replace(
        report,
        score=name.rpartition("/")[2] if other else "FID",
        left_out=selection.left_out,
        alerts=[*[of_objective] * other, *told, *findings.alerts(selection), *report.alerts],
        notes=findings.notes(selection, arms) + findings.notes_on_samples(selection, samples),
        protocol=findings.protocol_facts(selection),
        tables={
            ema_widths.TITLE: widths,
            "How steady training was": findings.training_table(r for r in runs if not r.fault),
            "What each arm changes": findings.settings_table(selection),
            "Runs": findings.runs_table(selection, arms, report.comparison.target),
        },
        samples=samples,
    )


def _wanted(found: list[T], arm_of: Callable[[T], str], only: Sequence[str] | None) -> list[T]:
    names = dict.fromkeys(map(arm_of, found))
    if lacking := [arm for arm in only or () if arm not in names]:
        raise ValueError(f"--arms: there is no {', '.join(lacking)}; there are {', '.join(names)}.")
    return [one for one in found if arm_of(one) in (only or names)]


def _report(arms: Sequence[Arm], baseline: str, target: float | None) -> Report:
    comparison = compare(arms, baseline, target)
    seen = by_images(arms)
    again = compare(seen, baseline, comparison.target) if seen else None
    base = comparison.baseline
    of = f"{base.lost} of {len(base.curves)} seeds"
    lost = [f"The last FID of the baseline, {base.name}, is not finite in {of}."]
    others = look_again(comparison)
    return Report(comparison, again, alerts=lost if base.lost else [], others=others)
