"""Recipes compared with the textbook recipe.

    recipe_table.py docs/results/atlas-STAGE-{STUDY,TEXTBOOK}.csv [docs/results/atlas-TEXTBOOK.csv]

The first table has the arms of the first file: scores and distances at the end of training, divided
by those of the first arm in the second file. They are geometric means over seeds, with 95%
intervals (paired t test on logarithms). The third file has runs of the textbook recipe with several
numbers of steps. With it, a second table has, for each distance, the steps after which a run of the
textbook recipe has the same distance, divided by the steps of the recipe.
"""

import math
import sys

from arms_table import print_table, ratio
from atlas_table import at_end, equal_length, lengths_of_baseline, log_distance, log_score, test

from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS


def main(recipe_file: str, textbook_file: str, lengths_file: str | None = None) -> None:
    recipes, (textbook, *_) = read_arms([recipe_file]), read_arms([textbook_file])
    names = [n for n in TARGETS if math.isfinite(at_end(n)(textbook.curves[0]))]
    heads = [name.replace("fid", "FID") for name in names]
    rows = []
    for recipe in recipes:
        measures = [log_score(names), *map(log_distance, names)]
        tests = [test(recipe, textbook, measure) for measure in measures]
        rows.append([recipe.name, *(ratio(each) if each else "not tested" for each in tests)])
    print_table(["recipe", "score", *heads], rows)
    if lengths_file is None:
        return
    lengths = lengths_of_baseline({arm.name: arm for arm in read_arms([lengths_file])})
    start = textbook.curves[0].steps[-1]
    rows = []
    for recipe in recipes:
        cells = []
        for name in names:
            result = test(recipe, textbook, log_distance(name))
            assert result is not None, f"{recipe.name} diverged"
            middle, low, high = (
                equal_length(lengths, start, each, name) / recipe.curves[0].steps[-1]
                for each in (result.difference, result.high, result.low)
            )
            cells.append(f"{middle:.2f}x [{low:.2f}, {high:.2f}]")
        rows.append([recipe.name, *cells])
    print()
    print_table(["speed-up in steps", *heads], rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
