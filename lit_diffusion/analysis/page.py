"""A report as one HTML file that needs no network."""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files

from lit_diffusion.analysis.headline import basis, headline, winners_text
from lit_diffusion.analysis.report import METHOD, Grid, Report, Section, sections
from lit_diffusion.analysis.tables import Table
from lit_diffusion.analysis.wording import by_images_text, verdict_text

_LONG = 110  # characters of a headline that would push the figure off the first screen


def html(report: Report, pictures: Mapping[str, str]) -> str:
    """The page.

    Args:
        report: what to tell.
        pictures: address of each figure but the samples, such as a data URI.
    """
    style = files("lit_diffusion.analysis").joinpath("report.css").read_text()
    first, *others = (_section(section, report, pictures) for section in sections(report))
    parts = [first, _caveats(report), *others]
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(headline(report.comparison))}</title>",
        f"<style>\n{style}</style>",
        "<main>",
        _top(report),
        *parts,
        _method(report),
        "</main>",
        "</html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _text(text: str) -> str:
    """Escaped, with a plus-minus sign where ASCII has two."""
    return escape(text).replace("+-", "&plusmn;")


def _top(report: Report) -> str:
    """The sentence, what stands behind it, and that not all runs take part."""
    comparison = report.comparison
    sentence = _text(headline(comparison))
    if who := _text(winners_text(comparison)):
        sentence = f'<em class="faster">{who}</em>{sentence.removeprefix(who)}'
    size = ' class="long"' * (len(headline(comparison)) > _LONG)
    lines = [f"<h1{size}>{sentence}</h1>", f'<p class="lead">{_text(basis(comparison))}</p>']
    if report.by_images is not None:
        told = _text(by_images_text(comparison, report.by_images))
        lines.append(f'<p class="alert">{told}</p>')
    lines += [f'<p class="alert">{_text(alert)}</p>' for alert in report.alerts]
    if report.left_out:
        count = len(report.left_out)
        what = "1 run takes" if count == 1 else f"{count} runs take"
        lines.append(f'<p class="alert">{what} no part: <a href="#caveats">which and why</a>.</p>')
    return "\n".join(lines)


def _caveats(report: Report) -> str:
    """Runs that take no part, and what else should be known."""
    items = [f"Left out: <code>{_text(r)}</code>: {_text(why)}." for r, why in report.left_out]
    items += [_text(note) for note in report.notes]
    return f'<h2 id="caveats">To bear in mind</h2>\n{_list(items)}' if items else ""


def _section(section: Section, report: Report, pictures: Mapping[str, str]) -> str:
    lines = [f"<h2>{_text(section.title)}</h2>"] if section.title else []
    if section.figure == "samples":
        lines.append(_grids(report.grids, section.caption))
    elif section.figure is not None:
        image = f'<img src="{pictures[section.figure]}" alt="{_alternative(section, report)}">'
        caption = f"<figcaption>{_text(section.caption)}</figcaption>"
        lines.append(f"<figure>{image}{caption}</figure>")
    if section.text:
        lines.append(f'<p class="lead">{_text(section.text)}</p>')
    return "\n".join([*lines, *(_table(table) for table in section.tables)])


def _alternative(section: Section, report: Report) -> str:
    """What the picture says, for those who cannot see it."""
    comparison = report.comparison
    if section.figure == "speedups-images" and report.by_images is not None:
        comparison = report.by_images
    if section.figure == "curves":
        return _text("FID over training for each arm. The table below has the numbers.")
    lines = [f"{r.arm.name}: {verdict_text(r, comparison)}" for r in comparison.results]
    return _text(f"Speed-ups over {comparison.baseline.name}. " + "; ".join(lines) + ".")


def _table(table: Table) -> str:
    wordy = [name in table.text_columns for name in table.columns]
    heads = "".join(
        _cell("th", text, words) for text, words in zip(table.columns, wordy, strict=True)
    )
    rows = []
    for first, *others in table.rows:
        cells = [f'<th scope="row">{_text(first)}</th>']
        cells += [_cell("td", text, w) for text, w in zip(others, wordy[1:], strict=True)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><caption>{_text(table.caption)}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _cell(tag: str, text: str, words: bool) -> str:
    kinds = ["words"] * words
    first = text.split(" ")[0]
    kinds += [first] * (words and first in ("faster", "slower", "unclear", "ends"))
    scope = ' scope="col"' if tag == "th" else ""
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<{tag}{scope}{kind}>{_text(text)}</{tag}>"


def _grids(grids: Iterable[Grid], caption: str) -> str:
    """A row an arm, a column a step."""
    known = {(grid.arm, grid.step): grid.png for grid in grids}
    arms = list(dict.fromkeys(arm for arm, _ in known))
    steps = list(dict.fromkeys(step for _, step in known))
    heads = "".join(f'<th scope="col">step {step:,}</th>' for step in steps)
    rows = []
    for arm in arms:
        cells = "".join(_picture(arm, step, known.get((arm, step))) for step in steps)
        rows.append(f'<tr><th scope="row">{_text(arm)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="grids"><caption>{_text(caption)}</caption>\n'
        f"<thead><tr><td></td>{heads}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _picture(arm: str, step: int, png: bytes | None) -> str:
    if png is None:
        return "<td>-</td>"
    source = "data:image/png;base64," + b64encode(png).decode()
    return f'<td><img src="{source}" alt="{_text(f"Samples of {arm} at step {step:,}")}"></td>'


def _method(report: Report) -> str:
    lines = ["<h2>How this was computed</h2>", f'<p class="aside">{_text(METHOD)}</p>']
    facts = [f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in report.protocol.items()]
    return "\n".join([*lines, *([f"<dl>{''.join(facts)}</dl>"] if facts else [])])


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
