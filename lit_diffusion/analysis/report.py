"""What a report on a comparison tells, in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lit_diffusion.analysis.by_seed import by_seed_table
from lit_diffusion.analysis.comparison import FIRST_ROWS, HEADLINE_SEEDS, Comparison
from lit_diffusion.analysis.headline import doubts
from lit_diffusion.analysis.tables import Table, fid_table, steadiness_table, verdict_table


@dataclass(frozen=True)
class Grid:
    """A picture of samples of one arm.

    Attributes:
        arm: name.
        step: optimizer steps completed.
        png: the file's content.
        seed: of the training run.
        weights: that generated them: ema, raw, ...
    """

    arm: str
    step: int
    png: bytes
    seed: str = "0"
    weights: str = "raw"


@dataclass(frozen=True)
class Report:
    """All that a report tells.

    Attributes:
        comparison: by optimizer steps.
        by_images: the same by images seen; None where that is not known, or no other.
        alerts: what to know together with the headline.
        left_out: run and reason, of runs that take no part.
        notes: what else a reader should know.
        protocol: how the FIDs were measured, by name.
        tables: further ones, by title.
        grids: samples of every arm at equal steps, from equal seeds.
    """

    comparison: Comparison
    by_images: Comparison | None = None
    alerts: Sequence[str] = ()
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
        text: below it.
        tables: below that.
    """

    title: str
    figure: str | None = None
    caption: str = ""
    text: str = ""
    tables: tuple[Table, ...] = ()


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
    "may be chance. A hollow mark has no interval, or is measured at another FID than the target. "
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


def _not_shown(comparison: Comparison) -> list[str]:
    """That the first figure is not of all arms."""
    more = len(comparison.results) - FIRST_ROWS
    if more <= 0:
        return []
    others = "1 other arm is" if more == 1 else f"{more} other arms are"
    return [f"{others} in the figure of all arms below; those with an interval come first."]


def sections(report: Report) -> list[Section]:
    """What a report shows, in order."""
    arms = report.comparison.arms
    found = [
        Section(
            "",
            "speedups",
            " ".join([_FOREST, *_not_shown(report.comparison)]),
            doubts(report.comparison),
            (verdict_table(report.comparison),),
        )
    ]
    if _not_shown(report.comparison):
        found.append(Section("Speed-ups of all arms", "speedups-all", _FOREST))
    found.append(Section("FID over training", "curves", _CURVES, tables=(fid_table(arms),)))
    if report.by_images is not None:
        by_images = (verdict_table(report.by_images, "images"),)
        found.append(Section("By images seen", "speedups-images", _FOREST, tables=by_images))
    if report.grids:
        found.append(Section("Samples", "samples", _SAMPLES.format(report.grids[0].weights)))
    if (by_seed := by_seed_table(report.comparison)) is not None:
        found.append(Section("Seed by seed", tables=(by_seed,)))
    found.append(Section("How steady the FIDs are", tables=(steadiness_table(arms),)))
    return found + [Section(title, tables=(table,)) for title, table in report.tables.items()]
