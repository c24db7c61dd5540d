"""`lit-diffusion compare`: which arm of an experiment trains fastest, and whether that is noise."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from lit_diffusion.cli.options import Parser

if TYPE_CHECKING:
    from lit_diffusion.lab.compare.report.report import Report

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
and fid (and seed, images, repeat) holds numbers from elsewhere, whose protocol is not known.

Where the runs have scores of `evaluate --ema`, the last FIDs are compared at each arm's own best
width of averaging, too.

Open DIR/report.html; beside it are report.md, the figures as PNG and the numbers as CSV.""",
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or CSV files")
    made.add_argument("--arms", nargs="+", metavar="ARM", help="only these (default: all)")
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
        "--metric",
        metavar="NAME",
        help="such as val/fid_360, where the runs have several, or a loss in metrics.csv: val/loss",
    )
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ValueError: for runs that cannot be compared.
    """
    args = parser().parse_args(argv[1:])
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder.")
    from lit_diffusion.lab.compare.report.report_files import write_report
    from lit_diffusion.lab.compare.report.wording import of_score
    from lit_diffusion.lab.compare.reporting import report_on_runs, report_on_tables

    if _are_tables(args.runs):
        report = report_on_tables(args.runs, args.baseline, args.target, args.arms)
    else:
        report = report_on_runs(args.runs, args.baseline, args.target, args.metric, args.arms)
    page = write_report(report, out)
    print(of_score("\n".join(_lines(report)), report.score))
    print(f"Report: {page}")


def _are_tables(names: Sequence[str]) -> bool:
    tables = [name.endswith(".csv") for name in names]
    if any(tables) and not all(tables):
        raise ValueError(
            "give either run folders or CSV files: how the FIDs of a CSV were measured is unknown."
        )
    return all(tables)


def _lines(report: "Report") -> Iterator[str]:
    from lit_diffusion.lab.compare.report.headline import basis, doubts
    from lit_diffusion.lab.compare.report.wording import verdict_text

    comparison = report.comparison
    yield report.headline
    yield f"{basis(comparison)} {doubts(comparison)}".rstrip()
    for result in comparison.results:
        yield f"  {result.arm.name}: {verdict_text(result, comparison)}"
    yield from report.warnings
    for name, why in report.left_out:
        yield f"Left out: {name}: {why}."
    for note in report.notes:
        yield f"Note: {shorten(note, _NOTE, placeholder=' ... (see the report)')}"
