"""Recipes compared with the textbook recipe: recipe_table.py RECIPES.csv TEXTBOOK.csv

The rows are the arms of the first file. Cells have the score and the distances at the end of
training, divided by those of the one arm in the second file: geometric means over seeds, with 95%
intervals (paired t test on logarithms).
"""

import math
import sys

from arms_table import print_table, ratio
from atlas_table import at_end, log_distance, log_score, test

from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS


def main(recipes: str, others: str) -> None:
    (textbook,) = read_arms([others])
    names = [n for n in TARGETS if math.isfinite(at_end(n)(textbook.curves[0]))]
    measures = [log_score(names), *map(log_distance, names)]
    rows = []
    for recipe in read_arms([recipes]):
        tests = [test(recipe, textbook, measure) for measure in measures]
        rows.append([recipe.name, *(ratio(each) if each else "not tested" for each in tests)])
    print_table(["recipe", "score", *(name.replace("fid", "FID") for name in names)], rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
