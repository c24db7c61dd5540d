"""What the doctor says: findings, the gravest first, and a verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial


class Level(IntEnum):
    """How grave a finding is."""

    OK = 0
    NOTE = 1  # worth knowing; nothing need be changed
    WARNING = 2  # the run ends, and probably not as it was meant
    PROBLEM = 3  # the run will not start, not end, or not do what it is asked for


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: how grave, about what, and rule, value and fix."""

    level: Level
    topic: str
    text: str


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def report(findings: Iterable[Finding]) -> str:
    """A line per finding, the gravest first, and the verdict.

    Example:
        >>> print(report([ok("devices", "1 CPU"), problem("disk", "full; delete something.")]))
        problem  disk     full; delete something.
        OK       devices  1 CPU
        <BLANKLINE>
        1 problem: a run would fail or be wasted.
    """
    ordered = sorted(findings, key=lambda finding: -finding.level)
    width = max((len(finding.topic) for finding in ordered), default=0)
    lines = []
    for finding in ordered:
        level = "OK" if finding.level is Level.OK else finding.level.name.lower()
        lines.append(f"{level:<7}  {finding.topic:<{width}}  {' '.join(finding.text.split())}")
    return "\n".join([*lines, "", verdict(ordered)])


def verdict(findings: Sequence[Finding]) -> str:
    """One line on all of them."""
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    told = count(warnings, "warning")
    if problems:
        more = f" and {told}" if warnings else ""
        return f"{count(problems, 'problem')}{more}: a run would fail or be wasted."
    if warnings:
        these = "it" if warnings == 1 else "them"
        return f"No problem, but {told}: look at {these} before a long run."
    return "No problem and no warning."


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a problem."""
    return any(finding.level is Level.PROBLEM for finding in findings)


def count(number: int, thing: str) -> str:
    """A number with its noun."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def size(num_bytes: float) -> str:
    """Bytes for people.

    Example:
        >>> size(900), size(2_500_000), size(5_700_000_000)
        ('900 bytes', '2.5 MB', '5.7 GB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds for people, to two digits.

    Example:
        >>> duration(0.0123), duration(75), duration(9000), duration(864_000)
        ('12 ms', '75 s', '2.5 h', '10 days')
    """
    units = [(63_115_200, 31_557_600, "years"), (172_800, 86_400, "days"), (7200, 3600, "h")]
    units += [(120, 60, "min"), (1, 1, "s")]
    for least, unit, name in units:
        if seconds >= least:
            return f"{_two_digits(seconds / unit)} {name}"
    return f"{_two_digits(1000 * seconds)} ms"


def share(part: float) -> str:
    """A share as a percentage.

    Example:
        >>> share(0.0312), share(0.25), share(0.0004)
        ('3.1%', '25%', '0.04%')
    """
    return f"{_two_digits(100 * part)}%"


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
