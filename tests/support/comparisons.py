"""Comparisons of made-up arms with a baseline, and what is said of them."""

import math

from lit_diffusion.lab.compare.comparison import Arm, compare
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.report import Report
from lit_diffusion.lab.compare.report.tables import Table
from lit_diffusion.lab.compare.report.wording import verdict_text
from support.experiments import STEPS, arm


def told(*arms, **options):
    """The comparison with a baseline of speed 1, and the verdict on each arm."""
    comparison = compare([arm("baseline", 1.0), *arms], "baseline", **options)
    return comparison, [verdict_text(result, comparison) for result in comparison.results]


def diverged(seeds=(0,)):
    """An arm that never has a finite FID."""
    return Arm("lost", tuple(Curve(str(k), STEPS, (math.nan,) * len(STEPS)) for k in seeds))


def ends_in_nan(name, speed, seeds):
    """An arm of which some seeds have no finite FID from half of the way."""
    half = len(STEPS) // 2
    nan = (math.nan,) * half
    curves = arm(name, speed).curves
    lost = [Curve(c.seed, STEPS, (*c.fids[:-half], *nan)) for c in curves[:seeds]]
    return Arm(name, (*lost, *curves[seeds:]))


def small_report(**others):
    """On three arms, with something in each part but samples."""
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("slow", 0.5)]
    parts = {
        "alerts": ["Samples <differ>."],
        "left_out": [("runs/x", "it has no FID")],
        "notes": ["Mind the gap."],
        "protocol": {"num_fake": "360"},
        "tables": {"Runs": Table("Every run.", ("arm", "seed"), (("fast", "0"),)), "None": None},
    }
    return Report(compare(arms, "baseline"), **(parts | others))
