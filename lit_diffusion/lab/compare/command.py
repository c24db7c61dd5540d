"""Options of `lit-diffusion compare`."""

from collections.abc import Sequence
from pathlib import Path

from lit_diffusion.cli.options import Parser, number, require_lab


def parser() -> Parser:
    """Build the parser of the command."""
    parser = Parser(
        "compare",
        """Compare ways to train by the number of steps to a target FID, over several seeds.

    lit-diffusion compare runs/digits-sweep --out report
    lit-diffusion compare runs/plain-seed0 runs/plain-seed1 runs/clts-seed0 runs/clts-seed1
    lit-diffusion compare numbers.csv --baseline GD --target 6.04

A RUN is a run folder, or a folder with run folders anywhere below it. An arm is one way to train.
The run folders of its seeds are called <arm>/seed-<n> or <arm>-seed<n>. Any other run folder is an
arm of its own. Each arm is compared with the baseline by Welch's t test on log steps. Use five
seeds or more before you claim a speed-up.

Some runs cannot be compared: runs without FID, runs whose FID was measured differently from the
baseline's, runs that were cut short, and runs with a broken file. The report leaves them out and
lists them. To compare numbers of other programs, pass a CSV file with the columns arm, step and
fid (and seed, images, repeat).

If you have run `evaluate --ema` on the runs, the report also compares the last FIDs of the arms,
each with the EMA width that is best for the arm.

Open DIR/report.html. The same folder has report.md, the figures as PNG and the numbers as CSV.""",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, or CSV files")
    add("--arms", nargs="+", metavar="ARM", help="only these arms (default: all)")
    add("--out", default="report", metavar="DIR", help="folder of the report (default report)")
    add("--baseline", metavar="ARM", help='default: the arm "baseline", else the first arm')
    text = "FID to reach (default: the lowest that every seed of the baseline reached)"
    add("--target", type=number, metavar="FID", help=text)
    text = "metric, such as val/fid_360 if runs have several FIDs, or a loss such as val/loss"
    add("--metric", metavar="NAME", help=text)
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
        raise ValueError(f"the report would overwrite its input {table}; choose another --out.")
    from lit_diffusion.lab.compare.report import build_report, write_report
    from lit_diffusion.lab.compare.tables import speedup_table

    report = build_report(args.runs, args.baseline, args.target, args.metric, args.arms)
    page = write_report(report, out)
    print(f"{report.result}\n{report.evidence}\n\n{speedup_table(report.comparison).markdown()}\n")
    for note in report.notes:
        print(f"- {note}")
    print(f"Report: {page}")
