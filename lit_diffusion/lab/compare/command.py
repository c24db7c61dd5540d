"""Options of `lit-diffusion compare`."""

from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, number, require_lab


def parser() -> Parser:
    """Build the parser of the command."""
    parser = Parser(
        "compare",
        """Compare ways to train by the steps that they need to reach a target FID, over seeds.

    lit-diffusion compare runs/digits-sweep --out report
    lit-diffusion compare runs/plain-seed0 runs/plain-seed1 runs/clts-seed0 runs/clts-seed1
    lit-diffusion compare numbers.csv --baseline GD --target 6.04

A RUN is a run folder, or a folder with run folders anywhere below it. An arm is one way to train.
The folders <arm>/seed-<n> or <arm>-seed<n> are its seeds. Any other run folder is an arm of its
own. Each arm is compared with the baseline by Welch's t test on log steps. Use five seeds or more
before you claim a speed-up.

The report leaves out, and names, runs whose FID has another protocol than the baseline's, runs
without FID, runs that were cut short, and runs with a broken file. To compare numbers of other
programs, pass a CSV file with the columns arm, step and fid (and seed, images, repeat).

If the runs have scores of `evaluate --ema`, the last FIDs are also compared at the best width of
the average of each arm.

Open DIR/report.html. The same folder has report.md, the figures as PNG and the numbers as CSV.""",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or CSV files")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these arms (default: all)")
    parser.add_argument(
        "--out", default="report", metavar="DIR", help="folder of the report (default report)"
    )
    parser.add_argument(
        "--baseline", metavar="ARM", help='default: the arm "baseline", else the first arm'
    )
    parser.add_argument(
        "--target",
        type=number,
        metavar="FID",
        help="FID to reach (default: the lowest that every seed of the baseline reached)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric, such as val/fid_360 if runs have several FIDs, or a loss such as val/loss",
    )
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ValueError: if the runs cannot be compared.
    """
    args = parser().parse_args(argv[1:])
    require_lab()
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder.")
    table = out / "curves.csv"
    if any(Path(run).resolve() == table.resolve() for run in args.runs):
        raise ValueError(f"the report would replace {table}, which is read; choose another --out.")
    from lit_diffusion.lab.compare.report import build_report, write_report
    from lit_diffusion.lab.compare.tables import speedup_table

    report = build_report(args.runs, args.baseline, args.target, args.metric, args.arms)
    page = write_report(report, out)
    print(f"{report.result}\n{report.evidence}\n\n{speedup_table(report.comparison).markdown()}\n")
    for note in report.notes:
        print(f"- {note}")
    print(f"Report: {page}")
