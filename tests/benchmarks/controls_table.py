"""Methods beside their own controls: controls_table.py FILE.csv ARM=CONTROL [ARM=CONTROL ...].

A row a pair, as Markdown: the speed-up of the arm over its control, the same by seed, and by seed
the last FID over the control's, as `lit-diffusion compare` has them for the two alone. Intervals
are of 95%; p-values are corrected (Holm) for the pairs, in each column by itself.
"""

import argparse
import math
from collections.abc import Iterator, Sequence

from csv_tables import print_table

from lit_diffusion.lab.compare.comparison import Result, compare
from lit_diffusion.lab.compare.curves import Arm, read_arms
from lit_diffusion.lab.compare.statistics import TTest, holm, last_fid_by_seed, speedup_by_seed
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup

HEADS = ["arm", "its control", "seeds", "speed-up", "by seed"]
HEADS += ["last FID over the control's, by seed"]


def tests_of(arm: Arm, control: Arm) -> tuple[Result, TTest, TTest]:
    result = compare([arm, control], control.name).results[0]
    speed, last = speedup_by_seed(arm, control, result.at), last_fid_by_seed(arm, control)
    if result.speedup.p is None or speed is None or last is None:
        raise SystemExit(f"{arm.name} and {control.name} cannot be tested.")
    return result, speed, last


def text(test: TTest, p: float | None, unit: str = "") -> str:
    ratio, low, high = map(math.exp, (test.difference, test.low, test.high))
    return f"{ratio:.2f}{unit} [{low:.2f}, {high:.2f}], p {format_p(p)}"


def rows(pairs: Sequence[tuple[Arm, Arm]]) -> Iterator[list[str]]:
    tests = [tests_of(*pair) for pair in pairs]
    columns = [[result.speedup.p, speed.p, last.p] for result, speed, last in tests]
    p_values = zip(*map(holm, zip(*columns, strict=True)), strict=True)
    for (arm, control), (result, speed, last), ps in zip(pairs, tests, p_values, strict=True):
        seeds = f"{len(arm.curves)}, {len(control.curves)}"
        faster = f"{format_speedup(result.speedup)} to {format_fid(result.at)}, p {format_p(ps[0])}"
        yield [arm.name, control.name, seeds, faster, text(speed, ps[1], "x"), text(last, ps[2])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("pairs", nargs="+")
    args = parser.parse_args()
    arms = {arm.name: arm for arm in read_arms([args.file])}
    names = [pair.split("=") for pair in args.pairs]
    print_table(HEADS, rows([(arms[first], arms[control]) for first, control in names]))
