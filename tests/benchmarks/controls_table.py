"""Methods beside their own controls: controls_table.py FILE.csv ARM=CONTROL [ARM=CONTROL ...].

A row a pair, as Markdown: the speed-up of the arm over its control, the same by seed, and by seed
the last FID over the control's, as `lit-diffusion compare` has them for the two alone. Intervals
are of 95%; p-values are corrected (Holm) for the pairs, in each column by itself.
"""

import argparse
import math
from collections.abc import Sequence

from lit_diffusion.lab.compare.comparison import Result, compare
from lit_diffusion.lab.compare.curves import Arm, read_arms
from lit_diffusion.lab.compare.statistics import TTest, holm, last_fid_by_seed, speedup_by_seed
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup

Tests = tuple[Result, TTest, TTest]


def tests_of(arm: Arm, control: Arm) -> Tests:
    result = compare([arm, control], control.name).results[0]
    speed, last = speedup_by_seed(arm, control, result.at), last_fid_by_seed(arm, control)
    if result.speedup.p is None or speed is None or last is None:
        raise SystemExit(f"{arm.name} and {control.name} cannot be tested.")
    return result, speed, last


def text(test: TTest, p: float | None, unit: str = "") -> str:
    ratio, low, high = map(math.exp, (test.difference, test.low, test.high))
    return f"{ratio:.2f}{unit} [{low:.2f}, {high:.2f}], p {format_p(p)}"


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def table(pairs: Sequence[tuple[Arm, Arm]]) -> None:
    tests = [tests_of(*pair) for pair in pairs]
    first = holm([result.speedup.p for result, _, _ in tests])
    second, third = (holm([each[k].p for each in tests]) for k in (1, 2))
    row(
        "arm", "its control", "seeds", "speed-up", "by seed", "last FID over the control's, by seed"
    )
    row(*["---"] * 6)
    for (arm, control), (result, speed, last), *ps in zip(
        pairs, tests, first, second, third, strict=True
    ):
        seeds = f"{len(arm.curves)}, {len(control.curves)}"
        faster = f"{format_speedup(result.speedup)} to {format_fid(result.at)}, p {format_p(ps[0])}"
        row(arm.name, control.name, seeds, faster, text(speed, ps[1], "x"), text(last, ps[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("pairs", nargs="+")
    args = parser.parse_args()
    arms = {arm.name: arm for arm in read_arms([args.file])}
    names = [pair.split("=") for pair in args.pairs]
    table([(arms[first], arms[control]) for first, control in names])


if __name__ == "__main__":
    main()
