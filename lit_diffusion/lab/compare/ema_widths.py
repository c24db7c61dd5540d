"""Arms judged by their last FIDs, each at its own best width of averaging (`evaluate --ema`)."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from lit_diffusion.lab.compare.found_runs import PROTOCOL, Record, Run
from lit_diffusion.lab.compare.report.tables import Table
from lit_diffusion.lab.compare.report.wording import fid_text, p_text
from lit_diffusion.lab.compare.selection import Selection
from lit_diffusion.lab.compare.speedup import holm, welch

TITLE = "At each arm's own best width of averaging"
_CAPTION = (
    "Last FIDs by evaluate --ema, geometric means over seeds. The width at which a seed is judged "
    "is the one with the lowest mean log FID of its arm's other seeds, so that the best of several "
    "owes nothing to the samples that it is judged on; an arm of one seed has none other, and is "
    "flattered. (end): the lowest or highest that was scored, so a better one may lie beyond. p: "
    "Welch's t test on log FID, corrected (Holm) for the arms."
)
_UNLIKE = "not judged: {}. Their seeds were not all scored by evaluate --ema, alike, at {}'s step."
_SHARED = ("step", "seeds", *(name for name in PROTOCOL if name not in ("metric", "weights")))

ByWidth = Mapping[float, float]
"""FIDs of a run by the width of the average."""


def judge(selection: Selection) -> tuple[Table | None, list[str]]:
    """The table, and what stands beside the headline; nothing where no run has such scores."""
    measured = {name: [fids_by_width(run) for run in runs] for name, runs in selection.arms.items()}
    base = selection.baseline
    arms = _alike(measured, base)
    lacking = [name for name in measured if name not in arms]
    told = [f"{TITLE}, {_UNLIKE.format(', '.join(lacking), base)}"] if lacking else []
    if base not in arms or len(arms) == 1:
        scored = any(fids for found in measured.values() for _, fids in found)
        return None, told if scored else []
    table = _table(arms, base)
    return table, [_sentence(table, base), *told]


def _alike(
    measured: Mapping[str, Sequence[tuple[Record, ByWidth]]], base: str
) -> dict[str, list[ByWidth]]:
    """Arms of which all seeds were measured as the baseline's first was, at a common width."""
    shared, _ = measured[base][0]
    return {
        name: [fids for _, fids in found]
        for name, found in measured.items()
        if shared and all(how == shared for how, _ in found) and _widths([f for _, f in found])
    }


def _table(arms: Mapping[str, Sequence[ByWidth]], base: str) -> Table:
    names = sorted(arms, key=lambda name: name != base)
    judged = {name: at_own_best(arms[name]) for name in names}
    logs = {name: [math.log(fid) for _, fid in found] for name, found in judged.items()}
    tests = [None if name == base else welch(logs[name], logs[base]) for name in names]
    ps = holm([test.p if test else None for test in tests])
    rows = [
        (
            name,
            _chosen(judged[name], arms[name]),
            ", ".join(f"{width:g}" for width in _widths(arms[name])),
            str(len(arms[name])),
            fid_text(math.exp(fmean(logs[name]))),
            f"{math.exp(fmean(logs[name]) - fmean(logs[base])):.2f}",
            p_text(p),
        )
        for name, p in zip(names, ps, strict=True)
    ]
    heads = ("arm", "width", "of those scored", "seeds", "FID", f"over {base}'s", "p")
    return Table(_CAPTION, heads, tuple(rows), text_columns=("width", "of those scored"))


def fids_by_width(run: Run) -> tuple[Record, ByWidth]:
    """How the widths of a run's last scored step were measured, as most were, and their FIDs."""
    records = [record for record in run.width_records if (record.get("value") or 0) > 0]
    last = [r for r in records if r["step"] == max(record["step"] for record in records)]
    if not last:
        return {}, {}
    ways = [(_how(record), record.get("sampling")) for record in last]
    usual = max(ways, key=ways.count)
    pairs = zip(last, ways, strict=True)
    fids = {float(r["weights"].removeprefix("power_")): r["value"] for r, w in pairs if w == usual}
    return usual[0], fids


def _how(record: Record) -> Record:
    return {name: record.get(name) for name in _SHARED}


def at_own_best(fids: Sequence[ByWidth]) -> list[tuple[float, float]]:
    """Of each seed, the width that its arm's other seeds choose, and its FID there.

    Example:
        >>> at_own_best([{0.05: 1.0, 0.1: 2.0}, {0.05: 4.0, 0.1: 3.0}])
        [(0.1, 2.0), (0.05, 4.0)]
    """
    found = []
    for k, own in enumerate(fids):
        others = [*fids[:k], *fids[k + 1 :]] or [own]
        means = {w: fmean(math.log(other[w]) for other in others) for w in _widths(fids)}
        width = min(means, key=lambda w: means[w])
        found.append((width, own[width]))
    return found


def _widths(fids: Sequence[ByWidth]) -> list[float]:
    """Those that every seed has."""
    return sorted(set.intersection(*map(set, fids)))


def _chosen(judged: Sequence[tuple[float, float]], fids: Sequence[ByWidth]) -> str:
    ends = {_widths(fids)[0], _widths(fids)[-1]}
    widths = sorted({width for width, _ in judged})
    return ", ".join(f"{width:g}{' (end)' * (width in ends)}" for width in widths)


def _sentence(table: Table, base: str) -> str:
    ends = [f"{row[0]} FID {row[4]} at {row[1]}" for row in table.rows]
    tests = [f"{row[0]} {row[5]} of {base}'s ({_p(row[6])})" for row in table.rows[1:]]
    return f"{TITLE}: {'; '.join(ends)}. {'; '.join(tests)}."


def _p(text: str) -> str:
    return "not tested" if text == "-" else f"p {text}" if text[0] == "<" else f"p = {text}"
