"""Write the report of a comparison into a folder.

report.html                     the whole report in one self-contained file
report.md                       the same in Markdown; figures are separate files
speedups.png, curves.png, ...   the figures
speedups.csv, fid.csv, ...      the numbers
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from markdown_it import MarkdownIt

from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.lab.compare import plots, run_tables, tables
from lit_diffusion.lab.compare.comparison import (
    HEADLINE_SEEDS,
    Comparison,
    by_images,
    by_other_metrics,
    compare,
    leads,
)
from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.lab.compare.run_folders import collect_runs, select
from lit_diffusion.lab.compare.sweep import BASELINE
from lit_diffusion.lab.compare.tables import Table, escape_markdown, format_fid
from lit_diffusion.metrics.evaluation_record import is_fid

T = TypeVar("T")

METHOD = """\
Steps to the target: the step at which the running minimum of FID first reaches the target. Log FID
is interpolated linearly between evaluations. The default target is the lowest FID that every seed
of the baseline reached. Speed-up: the baseline's steps divided by the arm's steps, both as
geometric means over training seeds, with the 95% interval of Welch's t test on log steps. If a seed
of an arm never reached the target, its steps are a bound (>). Its speed-up is then measured to the
lowest FID that all seeds of both arms reached. Faster and slower: p < 0.05 after Holm's correction
for the number of arms tested. A faster arm wins if all its seeds reach the target and its median
seed ends no higher than the baseline's. If an arm misses the target in every seed and shows no
difference in speed, its last FID is tested as well (Welch on log FID, Bonferroni for the number of
arms). If it is significantly higher than the baseline's, the verdict is "ends worse". Intervals are
not corrected for the number of arms. The best of many arms looks better than it is, because it was
selected for its result: expect a smaller gain with new seeds."""


@dataclass(frozen=True)
class Report:
    """Content of a report.

    Attributes:
        by_images: comparison by the number of training images instead of steps. None if the numbers
            of images are unknown, or if all arms use equally many images per step.
        others: comparisons by other metrics of the same samples, by name of the metric.
        notes: caveats about the numbers, such as a list of runs that were left out.
        protocol: settings with which FID was measured, by name.
        tables: further tables by title; None for a table without rows.
    """

    comparison: Comparison
    by_images: Comparison | None = None
    others: Mapping[str, Comparison] = field(default_factory=dict)
    notes: Sequence[str] = ()
    protocol: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Table | None] = field(default_factory=dict)
    samples: Sequence[plots.SamplePicture] = ()

    @property
    def result(self) -> str:
        """The best arm, its speed-up, and the FID of the speed-up, in one sentence."""
        comparison, best = self.comparison, self.comparison.best
        base, name = comparison.baseline.name, best.arm.name
        factor = tables.format_speedup(replace(best.speedup, low=None, high=None))
        speed = f"{factor} as fast as {base} to {comparison.metric} {format_fid(best.at)}"
        if not comparison.winners:
            if factor == "unknown":
                return f"No arm is shown to win: the speed-up of {name}, the best arm, is unknown."
            return f"No arm is shown to win: {name}, the best arm, is {speed}."
        not_leading = [metric for metric, other in self.others.items() if not leads(name, other)]
        caveat = f", but does not lead by {', '.join(not_leading)}" * bool(not_leading)
        return f"{name} wins: it is {speed}{caveat}."

    @property
    def evidence(self) -> str:
        """The interval, test, seeds and verdict behind the result."""
        comparison, best = self.comparison, self.comparison.best
        seeds = len(best.arm.curves), len(comparison.baseline.curves)
        p, speedup = tables.format_equation(best.holm_p), tables.format_speedup(best.speedup)
        test = f"{p} after Holm's correction for {comparison.num_tests} tests"
        parts = [
            f"Speed-up {speedup}{tables.format_target(best, comparison)}",
            "not tested" if best.holm_p is None else test,
            f"{seeds[0]} against {seeds[1]} training seeds",
        ]
        parts += [tables.format_verdict(best, comparison)] if not comparison.winners else []
        parts += ["provisional"] if comparison.winners and min(seeds) < HEADLINE_SEEDS else []
        return f"{'; '.join(parts)}."


def build_report(
    paths: Sequence[str],
    baseline: str | None = None,
    target: float | None = None,
    metric: str | None = None,
    only: Sequence[str] | None = None,
) -> Report:
    """Compare the arms of run folders or CSV files.

    The arguments are those of `lit-diffusion compare`. `only` contains the names that are passed as
    --arms.

    Raises:
        ValueError: if the runs, files or arms cannot be compared.
    """
    are_csv = [path.endswith(".csv") for path in paths]
    if any(are_csv) and not all(are_csv):
        raise ValueError(
            "pass either run folders or CSV files, not both: a CSV file does not say how its FIDs "
            "were measured."
        )
    if all(are_csv):
        arms = _filter_arms(read_arms(paths), lambda arm: arm.name, only)
        names = [arm.name for arm in arms]
        baseline = baseline or (BASELINE if BASELINE in names else names[0])
        note = "The numbers are from CSV files; how the FIDs were measured is not known."
        return _assemble_report(compare(arms, baseline, target), notes=[note])
    runs = _filter_arms(collect_runs(paths), lambda run: run.arm, only)
    selection = select(runs, baseline, metric)
    arms, notes, name = run_tables.arms_of(selection), [], "FID"
    if not is_fid(selection.metric):
        name = selection.metric.rpartition("/")[2]
        notes = [f"Lower {name} is better; {selection.metric} compares arms of one objective."]
    comparison = compare(arms, selection.baseline, target, name)
    widths, notes_on_widths = run_tables.widths_table(selection)
    notes += [*notes_on_widths, *run_tables.notes_on_runs(selection, arms)]
    notes += [f"Left out: {run}: {why}." for run, why in selection.left_out]
    return _assemble_report(
        comparison,
        notes,
        protocol=run_tables.protocol_facts(selection),
        tables={
            "At each arm's own best width of the average": widths,
            "How steady training was": run_tables.training_table(r for r in runs if not r.fault),
            "What each arm changes": run_tables.settings_table(selection),
        },
        samples=run_tables.sample_pictures(selection, comparison.arms),
    )


def _filter_arms(items: list[T], arm_of: Callable[[T], str], arms: Sequence[str] | None) -> list[T]:
    names = dict.fromkeys(map(arm_of, items))
    if missing := [arm for arm in arms or () if arm not in names]:
        raise ValueError(f"--arms: there is no {', '.join(missing)}; there are {', '.join(names)}.")
    return [item for item in items if arm_of(item) in (arms or names)]


def _assemble_report(comparison: Comparison, notes: Sequence[str], **parts: Any) -> Report:
    base, arms = comparison.baseline, comparison.arms
    worst, best = base.reached_by_all, min(curve.best for curve in base.curves)
    extra = []
    if nonfinite := [f"{arm.nonfinite_ends} of {arm.name}" for arm in arms if arm.nonfinite_ends]:
        extra.append(f"Seeds without a finite last {comparison.metric}: {', '.join(nonfinite)}.")
    if worst == comparison.target > 1.2 * best:
        seed = next(curve.seed for curve in base.curves if curve.best == worst)
        extra.append(
            f"Seed {seed} of {base.name} makes the target easy to reach: the median seed reaches "
            f"{format_fid(base.median_best)}, and the best seed {format_fid(best)}."
        )
    images = None
    if (with_images := by_images(arms)) is not None:
        images = compare(with_images, base.name, comparison.target, comparison.metric)
        extra.append("Arms differ in images per step; see the comparison by images seen.")
    return Report(comparison, images, by_other_metrics(comparison), [*extra, *notes], **parts)


# Files


def markdown(report: Report) -> str:
    """Format the report as Markdown, with links to figures (PNG files) in the same folder."""
    comparison, metric = report.comparison, report.comparison.metric
    parts = [
        f"# {escape_markdown(report.result)}",
        escape_markdown(report.evidence),
        "![Speed-ups; the table below has the numbers](speedups.png)",
        f"Bars: 95% intervals, thin for fewer than {HEADLINE_SEEDS} seeds. Hollow marks: no "
        f"interval, or measured at another {metric}.",
        tables.speedup_table(comparison).markdown(),
    ]
    parts += ["## Notes", _bullet_list(report.notes)] if report.notes else []
    parts += [
        f"## {metric} over training",
        f"![{metric} over training](curves.png)",
        "Thin lines: one training seed each. Thick lines: geometric means.",
        tables.fid_table(comparison).markdown(),
    ]
    if report.samples:
        weights, seeds = report.samples[0].weights, {each.seed for each in report.samples}
        parts += [
            "## Samples",
            "![Samples: a row per arm, a column per step](samples.png)",
            f"Same-seed samples by {escape_markdown(weights)} weights, of training seed "
            f"{escape_markdown(' or '.join(sorted(seeds)))}.",
        ]
    images = report.by_images
    last = tables.last_samples_table(comparison.arms) if report.others else None
    sections = {
        "By images seen": tables.speedup_table(images, "images") if images else None,
        "Seed by seed": tables.by_seed_table(comparison),
        "By other metrics": tables.other_metrics_table(report.others),
        "All metrics of the last samples": last,
        f"How steady the {metric} is": tables.steadiness_table(comparison),
        **report.tables,
    }
    for title, table in sections.items():
        parts += [f"## {title}", table.markdown()] if table else []
    facts = _bullet_list(f"{name}: {value}" for name, value in report.protocol.items())
    parts += ["## How this was computed", " ".join(METHOD.split()), facts]
    return "\n\n".join(filter(None, parts)) + "\n"


def _bullet_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape_markdown(line)}" for line in lines)


def html(text: str, pngs: Mapping[str, bytes]) -> str:
    """Convert a report's Markdown to one HTML page; `pngs` maps file names to figures."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    body = str(parser.render(text.replace("+-", "\N{PLUS-MINUS SIGN}")))
    for name, png in pngs.items():  # quotes in the text are &quot;
        address = f"data:image/png;base64,{b64encode(png).decode()}"
        body = body.replace(f'src="{name}"', f'src="{address}"')
    body = body.replace("<table>", '<div class="scroll"><table>')
    body = body.replace("</table>", "</table></div>")
    style = files("lit_diffusion.lab.compare").joinpath("report.css").read_text()
    title = body.partition("<h1>")[2].partition("</h1>")[0]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n"
        f"<main>\n{body}</main>\n</html>\n"
    )


def write_report(report: Report, folder: Path) -> Path:
    """Write all files of a report.

    Returns:
        Path of report.html.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparison, images = report.comparison, report.by_images
    figures = {
        "speedups.png": plots.speedup_figure(comparison),
        "curves.png": plots.curves_figure(comparison),
    }
    if report.samples:
        figures["samples.png"] = plots.samples_figure(report.samples)
    pngs = {name: plots.png_bytes(figure) for name, figure in figures.items()}
    records = {
        "speedups.csv": tables.speedup_records(comparison),
        "fid.csv": tables.fid_records(comparison.arms),
        "curves.csv": tables.curve_records(comparison.arms),
        "speedups-images.csv": tables.speedup_records(images) if images else [],
    }
    text = markdown(report)
    page = folder / "report.html"
    if page.exists():  # an earlier report may have had figures or numbers that this one lacks
        for name in ("samples.png", "speedups-images.csv"):
            if name not in pngs and not records.get(name):
                (folder / name).unlink(missing_ok=True)
    for name, png in pngs.items():
        with atomic_write(folder / name) as file:
            file.write(png)
    for name, rows in records.items():
        if rows:
            atomic_write_text(folder / name, tables.to_csv(rows))
    atomic_write_text(folder / "report.md", text)
    atomic_write_text(page, html(text, pngs))
    return page
