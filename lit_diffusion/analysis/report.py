"""A comparison as a folder: one page to read, figures, tables and numbers.

report.html                     everything, in one file that needs no network
report.md                       the same for a repository, with the figures beside it
speedups.png, curves.png, ...   the figures
speedups.csv, fid.csv, ...      the numbers
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from lit_diffusion.analysis.comparison import Comparison
from lit_diffusion.analysis.plots import curves_figure, samples_figure, save, speedup_figure
from lit_diffusion.analysis.tables import (
    Table,
    curve_records,
    fid_records,
    fid_table,
    speedup_records,
    steadiness_table,
    to_csv,
    verdict_table,
)
from lit_diffusion.analysis.wording import by_images_text, explanation, headline


@dataclass(frozen=True)
class Grid:
    """A picture of samples of one arm.

    Attributes:
        arm: name.
        step: optimizer steps completed.
        png: the file's content.
    """

    arm: str
    step: int
    png: bytes


@dataclass(frozen=True)
class Report:
    """All that a report tells.

    Attributes:
        comparison: by optimizer steps.
        by_images: the same by images seen; None where that is not known, or no other.
        left_out: run and reason, of runs that take no part.
        notes: what else a reader should know.
        protocol: how the FIDs were measured, by name.
        tables: further ones, by title.
        grids: samples of every arm at equal steps, from equal seeds.
    """

    comparison: Comparison
    by_images: Comparison | None = None
    left_out: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    protocol: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    grids: Sequence[Grid] = ()


@dataclass(frozen=True)
class Section:
    """A part of a report under its own title.

    Attributes:
        title: empty for the part at the top.
        figure: name of the picture that comes first; None without.
        caption: of the picture.
        tables: below it.
    """

    title: str
    figure: str | None = None
    caption: str = ""
    tables: tuple[Table, ...] = ()


METHOD = (
    "An arm's steps to the target are where the running minimum of its FID first reaches it, with "
    "log FID taken for linear between evaluations. Speed-up: the baseline's steps over the arm's, "
    "as geometric means over training seeds, with the 95% interval of Welch's t test on log steps. "
    "The target, unless given, is the lowest FID that every seed of the baseline reached. Where a "
    "seed of an arm never reached it, that arm's steps are a bound (>), and its speed-up that to "
    "the lowest FID which all seeds of both arms reached. The verdicts faster and slower need a "
    "p-value below 0.05 after Holm's correction for the number of arms tested."
)
_FOREST = (
    "The bar is the 95% interval of the speed-up: where it crosses the line at 1x, the difference "
    "may be chance. A hollow mark has no interval, or is measured at another FID than the target."
)
_CURVES = (
    "Thin lines: one training seed each. Thick lines: their geometric mean. Dots: where the target "
    "is reached."
)
_SAMPLES = "Samples of equal seeds after equal numbers of steps, from one training run of each arm."


def sections(report: Report) -> list[Section]:
    """What a report shows, in order."""
    arms = report.comparison.arms
    found = [
        Section("", "speedups", _FOREST, (verdict_table(report.comparison),)),
        Section("FID over training", "curves", _CURVES, (fid_table(arms),)),
    ]
    if report.by_images is not None:
        by_images = (verdict_table(report.by_images, "images"),)
        found.append(Section("By images seen", "speedups-images", _FOREST, by_images))
    if report.grids:
        found.append(Section("Samples", "samples", _SAMPLES))
    found.append(Section("How steady the FIDs are", tables=(steadiness_table(arms),)))
    return found + [Section(title, tables=(table,)) for title, table in report.tables.items()]


def figures(report: Report) -> dict[str, Figure]:
    """The pictures of `sections`, by name."""
    drawn = {
        "speedups": speedup_figure(report.comparison),
        "curves": curves_figure(report.comparison),
    }
    if report.by_images is not None:
        drawn["speedups-images"] = speedup_figure(report.by_images, "images")
    if report.grids:
        drawn["samples"] = samples_figure([(g.arm, g.step, g.png) for g in report.grids])
    return drawn


def write_report(report: Report, folder: Path) -> Path:
    """Write all files of a report.

    Args:
        report: what to tell.
        folder: made if need be; files of the same names are replaced.

    Returns:
        The page to open.
    """
    from lit_diffusion.analysis.page import html

    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(report)
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.png")
    for name, records in _records(report).items():
        (folder / f"{name}.csv").write_text(to_csv(records))
    (folder / "report.md").write_text(markdown(report))
    page = folder / "report.html"
    page.write_text(html(report, {name: _data_uri(figure) for name, figure in drawn.items()}))
    return page


def markdown(report: Report) -> str:
    """The report for a repository; its figures are the PNG files beside it."""
    first, *others = (_part(section) for section in sections(report))
    caveats = [f"Left out: `{run}`: {why}." for run, why in report.left_out] + [*report.notes]
    comparison, images = report.comparison, report.by_images
    parts = [
        f"# {headline(comparison)}",
        explanation(comparison),
        "" if images is None else by_images_text(comparison, images),
        first,
        *(["## To bear in mind", _listed(caveats)] if caveats else []),
        *others,
        "## How this was computed",
        METHOD,
        _listed(f"{name}: {value}" for name, value in report.protocol.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _part(section: Section) -> str:
    parts = [f"## {section.title}"] if section.title else []
    if section.figure is not None:
        parts += [f"![{section.title or 'Speed-ups'}]({section.figure}.png)", section.caption]
    return "\n\n".join([*parts, *(table.markdown() for table in section.tables)])


def _listed(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _records(report: Report) -> dict[str, list[dict[str, Any]]]:
    arms = report.comparison.arms
    tables = {
        "speedups": speedup_records(report.comparison),
        "fid": fid_records(arms),
        "curves": curve_records(arms),
    }
    if report.by_images is not None:
        tables["speedups-images"] = speedup_records(report.by_images)
    return tables


def _data_uri(figure: Figure) -> str:
    """A figure as vector graphics inside a page, sharp at any size."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        save(figure, path)
        return "data:image/svg+xml;base64," + b64encode(path.read_bytes()).decode()
