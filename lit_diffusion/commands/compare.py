"""`lit-diffusion compare`: which arm of an experiment trains fastest, and whether that is noise."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from lit_diffusion.commands.options import Parser

if TYPE_CHECKING:
    from lit_diffusion.analysis.comparison import Arm
    from lit_diffusion.analysis.report import Report

_NOTE = 190  # characters of one in the terminal; the report has it in full


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "compare",
        """Compare ways to train by the steps that they need to a target FID, over several seeds.

    lit-diffusion compare runs/digits-sweep --out report
    lit-diffusion compare runs/plain-seed0 runs/plain-seed1 runs/clts-seed0 runs/clts-seed1
    lit-diffusion compare numbers.csv --baseline GD --target 6.04

A RUN is a run folder, or a folder with run folders anywhere below it. Folders <arm>/seed-<n> or
<arm>-seed<n> are seeds of one arm; any other run folder is an arm of its own. Each arm is told from
the baseline by Welch's t test on log steps: for a claim, have five seeds or more.

FIDs of another protocol than the baseline's, runs without FID, runs that were cut short and runs
with a broken file take no part, and the report names them. A CSV file with the columns arm, step
and fid (and seed, images) holds numbers from elsewhere, whose protocol is not known.

Open DIR/report.html; beside it are report.md, the figures as PNG and the numbers as CSV.""",
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or CSV files")
    made.add_argument("--out", default="report", metavar="DIR", help="default report")
    made.add_argument(
        "--baseline", metavar="ARM", help="default: the arm called baseline, else the first"
    )
    made.add_argument(
        "--target",
        type=float,
        metavar="FID",
        help="FID to reach (default: the lowest that every seed of the baseline reached)",
    )
    made.add_argument(
        "--metric", metavar="NAME", help="such as val/fid_360, where the runs have several"
    )
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "compare", then options.

    Raises:
        ValueError: for runs that cannot be compared.
    """
    args = parser().parse_args(argv[1:])
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder.")
    from lit_diffusion.analysis.headline import explanation, headline
    from lit_diffusion.analysis.report_files import write_report
    from lit_diffusion.analysis.wording import by_images_text, verdict_text

    report = _of_tables(args) if _are_tables(args.runs) else _of_runs(args)
    page = write_report(report, out)
    print(headline(report.comparison))
    print(explanation(report.comparison))
    for result in report.comparison.results:
        print(f"  {result.arm.name}: {verdict_text(result, report.comparison)}")
    if report.by_images is not None:
        print(by_images_text(report.comparison, report.by_images))
    for alert in report.alerts:
        print(alert)
    for name, why in report.left_out:
        print(f"Left out: {name}: {why}.")
    for note in report.notes:
        print(f"Note: {shorten(note, _NOTE, placeholder=' ... (see the report)')}")
    print(f"Report: {page}")


def _are_tables(names: Sequence[str]) -> bool:
    tables = [name.endswith(".csv") for name in names]
    if any(tables) and not all(tables):
        raise ValueError(
            "give either run folders or CSV files: how the FIDs of a CSV were measured is unknown."
        )
    return all(tables)


def _of_tables(args: argparse.Namespace) -> "Report":
    """The report on CSV files."""
    from lit_diffusion.commands.arms import BASELINE
    from lit_diffusion.commands.curve_tables import read_arms

    arms = read_arms(args.runs)
    names = [arm.name for arm in arms]
    baseline = args.baseline or (BASELINE if BASELINE in names else names[0])
    notes = ["The numbers are from CSV files; how the FIDs were measured is not known."]
    return replace(_report(arms, baseline, args.target), notes=notes)


def _of_runs(args: argparse.Namespace) -> "Report":
    """The report on run folders."""
    from lit_diffusion.commands import findings
    from lit_diffusion.commands.experiment import find_runs
    from lit_diffusion.commands.selection import select

    runs = find_runs(args.runs)
    selection = select(runs, args.baseline, args.metric)
    arms = findings.arms_of(selection)
    report = _report(arms, selection.baseline, args.target)
    tables = {
        "How steady training was": findings.steadiness_of(run for run in runs if not run.fault)
    }
    tables["What each arm changes"] = findings.settings_table(selection)
    grids = findings.sample_grids(selection, [arm.name for arm in report.comparison.arms])
    tables["Runs"] = findings.runs_table(selection, arms, report.comparison.target)
    return replace(
        report,
        left_out=selection.left_out,
        alerts=[*findings.alerts(selection), *report.alerts],
        notes=findings.notes(selection, arms) + findings.notes_on_samples(selection, grids),
        protocol=findings.protocol_facts(selection),
        tables={title: table for title, table in tables.items() if table is not None},
        grids=grids,
    )


def _report(arms: "Sequence[Arm]", baseline: str, target: float | None) -> "Report":
    """The comparison by steps, and by images seen where that is another."""
    from lit_diffusion.analysis.comparison import by_images, compare, same_images_a_step
    from lit_diffusion.analysis.report import Report

    comparison = compare(arms, baseline, target)
    seen = None if same_images_a_step(arms) else by_images(arms)
    again = compare(seen, baseline, comparison.target) if seen else None
    return Report(comparison, again, alerts=_lost(comparison.baseline))


def _lost(baseline: "Arm") -> list[str]:
    if not baseline.lost:
        return []
    of = f"{baseline.lost} of {len(baseline.curves)} seeds"
    return [f"The last FID of the baseline, {baseline.name}, is not finite in {of}."]
