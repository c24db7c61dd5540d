"""A report as a folder: one page to read, figures, tables and numbers.

report.html                     everything, in one file that needs no network
report.md                       the same for a repository, with the figures beside it
speedups.png, curves.png, ...   the figures
speedups.csv, fid.csv, ...      the numbers
"""

from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from lit_diffusion.analysis.headline import basis, headline
from lit_diffusion.analysis.markdown import code, escaped
from lit_diffusion.analysis.page import html
from lit_diffusion.analysis.plots import curves_figure, samples_figure, save, speedup_figure
from lit_diffusion.analysis.report import METHOD, Report, Section, sections
from lit_diffusion.analysis.tables import curve_records, fid_records, speedup_records, to_csv
from lit_diffusion.analysis.wording import by_images_text


def figures(report: Report) -> dict[str, Figure]:
    """The pictures of `sections`, by name."""
    drawn = {
        "speedups": speedup_figure(report.comparison, results=report.comparison.first()),
        "curves": curves_figure(report.comparison),
    }
    if len(report.comparison.first()) < len(report.comparison.results):
        drawn["speedups-all"] = speedup_figure(report.comparison)
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
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(report)
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.png")
    for name, records in _records(report).items():
        (folder / f"{name}.csv").write_text(to_csv(records))
    (folder / "report.md").write_text(markdown(report))
    page = folder / "report.html"
    inline = {name: _data_uri(figure) for name, figure in drawn.items() if name != "samples"}
    page.write_text(html(report, inline))
    return page


def markdown(report: Report) -> str:
    """The report for a repository; its figures are the PNG files beside it."""
    first, *others = (_part(section) for section in sections(report))
    caveats = [f"Left out: {code(run)}: {escaped(why)}." for run, why in report.left_out]
    caveats += [escaped(note) for note in report.notes]
    comparison, images = report.comparison, report.by_images
    parts = [
        f"# {escaped(headline(comparison))}",
        escaped(basis(comparison)),
        "" if images is None else escaped(by_images_text(comparison, images)),
        *(escaped(alert) for alert in report.alerts),
        first,
        *(["## To bear in mind", _listed(caveats)] if caveats else []),
        *others,
        "## How this was computed",
        METHOD,
        _listed(escaped(f"{name}: {value}") for name, value in report.protocol.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _part(section: Section) -> str:
    parts = [f"## {escaped(section.title)}"] if section.title else []
    if section.figure is not None:
        parts += [
            f"![{section.title or 'Speed-ups'}]({section.figure}.png)",
            escaped(section.caption),
        ]
    parts += [escaped(section.text)] if section.text else []
    return "\n\n".join([*parts, *(table.markdown() for table in section.tables)])


def _listed(lines: Iterable[str]) -> str:
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
