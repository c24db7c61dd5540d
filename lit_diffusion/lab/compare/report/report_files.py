"""A report as a folder: one page to read, figures, tables and numbers.

report.html                     everything, in one file that needs no network
report.md                       the same for a repository, with the figures beside it
speedups.png, curves.png, ...   the figures
speedups.csv, fid.csv, ...      the numbers
"""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.text import Text

from lit_diffusion.lab.compare.report import plots, tables
from lit_diffusion.lab.compare.report.page import html
from lit_diffusion.lab.compare.report.report import Report, markdown
from lit_diffusion.lab.compare.report.wording import of_score


def figures(report: Report) -> dict[str, Figure]:
    """The pictures of a report, by name."""
    drawn = {
        "speedups": plots.speedup_figure(report.comparison, results=report.comparison.first()),
        "curves": plots.curves_figure(report.comparison),
    }
    if len(report.comparison.first()) < len(report.comparison.results):
        drawn["speedups-all"] = plots.speedup_figure(report.comparison)
    if report.by_images is not None:
        drawn["speedups-images"] = plots.speedup_figure(report.by_images, "images")
    if report.samples:
        drawn["samples"] = plots.samples_figure(report.samples)
    for text in (text for figure in drawn.values() for text in figure.findobj(Text)):
        text.set_text(of_score(text.get_text(), report.score))
    return drawn


def write_report(report: Report, folder: Path) -> Path:
    """Write all files of a report.

    Returns:
        The page to open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(report)
    for name, figure in drawn.items():
        (folder / f"{name}.png").write_bytes(plots.as_bytes(figure, "png"))
    arms, images = report.comparison.arms, report.by_images
    numbers = {
        "speedups": tables.speedup_records(report.comparison),
        "fid": tables.fid_records(arms),
        "curves": tables.curve_records(arms),
    } | ({"speedups-images": tables.speedup_records(images)} if images else {})
    for name, records in numbers.items():
        (folder / f"{name}.csv").write_text(tables.to_csv(records))
    text = markdown(report)
    (folder / "report.md").write_text(text)
    page = folder / "report.html"
    page.write_text(html(text, _inline(drawn)))
    return page


def _inline(drawn: Mapping[str, Figure]) -> dict[str, str]:
    """Figures as vector graphics inside a page, sharp at any size, by the names of their files."""
    coded = {name: b64encode(plots.as_bytes(figure, "svg")) for name, figure in drawn.items()}
    return {f"{n}.png": f"data:image/svg+xml;base64,{data.decode()}" for n, data in coded.items()}
