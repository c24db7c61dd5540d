"""What a report on a comparison says, in which order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lit_diffusion.lab.compare.by_seed import by_seed_table
from lit_diffusion.lab.compare.comparison import FIRST_ROWS, HEADLINE_SEEDS, Comparison
from lit_diffusion.lab.compare.report.headline import basis, doubts, headline, winners_text
from lit_diffusion.lab.compare.report.markdown import code, escaped
from lit_diffusion.lab.compare.report.second_look import caveat, last_table, speed_table
from lit_diffusion.lab.compare.report.tables import (
    Table,
    fid_table,
    steadiness_table,
    verdict_table,
)
from lit_diffusion.lab.compare.report.wording import by_images_text, of_score


@dataclass(frozen=True)
class SamplePicture:
    """Samples of one arm, by which weights (ema, raw, ...) of which training run; a PNG file."""

    arm: str
    step: int
    png: bytes
    seed: str = "0"
    weights: str = "raw"


@dataclass(frozen=True)
class Report:
    """All that a report says.

    Attributes:
        by_images: the comparison by images seen; None where that is not known, or no other.
        alerts: what to know together with the headline.
        left_out: run and reason, of runs that take no part.
        protocol: how the FIDs were measured, by name.
        tables: further ones, by title; None where there is nothing to show.
        others: the comparison by other measures of the same samples, by their names.
        score: what is compared, in a word, which stands wherever a text of ours says FID.
    """

    comparison: Comparison
    by_images: Comparison | None = None
    alerts: Sequence[str] = ()
    left_out: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    protocol: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Table | None] = field(default_factory=dict)
    samples: Sequence[SamplePicture] = ()
    others: Mapping[str, Comparison] = field(default_factory=dict)
    score: str = "FID"

    @property
    def headline(self) -> str:
        """Which arm won, whether that is noise, and by which measures it does not lead."""
        return f"{headline(self.comparison)} {caveat(self.comparison, self.others)}".rstrip()

    @property
    def warnings(self) -> list[str]:
        """What stands beside the headline: the best arm by images seen, then the alerts."""
        images = self.by_images
        seen = [] if images is None else [by_images_text(self.comparison, images)]
        return [*seen, *self.alerts]


METHOD = (
    "An arm's steps to the target are where the running minimum of its FID first reaches it, with "
    "log FID taken for linear between evaluations. Speed-up: the baseline's steps over the arm's, "
    "as geometric means over training seeds, with the 95% interval of Welch's t test on log "
    "steps. The target, unless given, is the lowest FID that every seed of the baseline reached. "
    "Where a seed of an arm never reached it, that arm's steps are a bound (>), and its speed-up "
    "that to the lowest FID which all seeds of both arms reached; an arm that misses the target "
    "in every seed and has no such FID does not get there. Where every seed of an arm misses a "
    "target that the baseline reached, and its speed is not shown to differ, its last FID is "
    "tested as well, if it was trained for as long and all last FIDs are finite: where log FID is "
    "above the baseline's, with Welch's p-value times the number of arms below 0.05, it ends "
    "worse. The verdicts faster and slower need a p-value below 0.05 after Holm's correction for "
    "the number of arms tested, and faster a finite last FID in every seed. A faster arm wins if "
    "all its seeds reach the target and its median seed's lowest FID is no higher than the "
    "baseline's. Arms that win and that the fastest does not lead by more than noise (the "
    "interval of its speed-up over them holds 1) win with it."
)
_FOREST = (
    "The bar is the 95% interval of the speed-up: where it crosses the line at 1x, the difference "
    "may be chance. Verdicts are corrected for the number of arms, and bars are not, so a bar that "
    "is clear of 1x may be unclear. A hollow mark has no interval, or is measured at another FID. "
    f"A thin bar is provisional: fewer than {HEADLINE_SEEDS} seeds."
)
_CURVES = (
    "Thin lines: one training seed each. Thick lines: their geometric mean. Dots: where the target "
    "is reached."
)
_SAMPLES = (
    "Samples of equal seeds after equal numbers of steps, from one training run of each arm, by "
    "its {} weights."
)


def markdown(report: Report) -> str:
    """The report for a repository; its figures are PNG files beside it."""
    parts = [*_first(report), *_caveats(report), *_details(report), "## How this was computed"]
    facts = _listed(escaped(f"{name}: {value}") for name, value in report.protocol.items())
    text = "\n\n".join(part for part in [*parts, METHOD, facts] if part) + "\n"
    return of_score(text, report.score)


def _first(report: Report) -> list[str]:
    """What a first look needs: which arm won, the numbers behind it, and what is against it."""
    comparison = report.comparison
    more = len(comparison.results) - FIRST_ROWS
    others = f" Those with an interval come first; {more} more are in the figure of all arms below."
    warnings = report.warnings
    if report.left_out:
        warnings.append(f"Runs that take no part: {len(report.left_out)}; see To bear in mind.")
    return [
        _title(report),
        escaped(basis(comparison)),
        *(f"> {escaped(warning)}" for warning in warnings),
        "![Speed-ups; the table below has the numbers](speedups.png)",
        _FOREST + others * (more > 0),
        escaped(doubts(comparison)),
        verdict_table(comparison).markdown(),
    ]


def _title(report: Report) -> str:
    who, sentence = winners_text(report.comparison), report.headline
    bold = f"**{escaped(who)}** " if who else ""
    return f"# {bold}{escaped(sentence.removeprefix(who))}"


def _caveats(report: Report) -> list[str]:
    lines = [f"Left out: {code(run)}: {escaped(why)}." for run, why in report.left_out]
    lines += [escaped(note) for note in report.notes]
    return ["## To bear in mind", _listed(lines)] if lines else []


def _details(report: Report) -> list[str]:
    arms, found = report.comparison.arms, list[str]()
    if len(report.comparison.results) > FIRST_ROWS:
        found += ["## Speed-ups of all arms", "![Speed-ups](speedups-all.png)", _FOREST]
    found += ["## FID over training", "![FID over training](curves.png)", _CURVES]
    found.append(fid_table(arms).markdown())
    if report.by_images is not None:
        found += ["## By images seen", "![Speed-ups by images](speedups-images.png)", _FOREST]
        found.append(verdict_table(report.by_images, "images").markdown())
    if report.samples:
        alternative = "Samples: a row an arm, a column a step"
        found += ["## Samples", f"![{alternative}](samples.png)"]
        found.append(_SAMPLES.format(escaped(report.samples[0].weights)))
    tables = {
        "Seed by seed": by_seed_table(report.comparison),
        "By other measures": speed_table(report.others),
        "What the last samples are like": last_table(arms) if report.others else None,
        "How steady the FIDs are": steadiness_table(arms),
        **report.tables,
    }
    for title, table in tables.items():
        found += [f"## {title}", table.markdown()] if table is not None else []
    return found


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
