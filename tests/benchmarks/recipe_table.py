"""Recipes beside the textbook recipe: recipe_table.py RECIPES.csv TEXTBOOK.csv

The rows are the arms of the first file. Cells have the score and the distances at the end of
training, divided by those of the baseline in the second file: geometric means over seeds, with 95%
intervals (paired t test on logarithms).
"""

import sys

from arms_table import print_table, ratio
from atlas_table import log_distance, log_score, test

from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS
from lit_diffusion.lab.compare.sweep import BASELINE


def main(recipes: str, others: str) -> None:
    (textbook,) = (arm for arm in read_arms([others]) if arm.name == BASELINE)
    names = [*TARGETS]
    measures = [log_score(names), *map(log_distance, names)]
    rows = []
    for recipe in read_arms([recipes]):
        tests = [test(recipe, textbook, measure) for measure in measures]
        rows.append([recipe.name, *(ratio(each) if each else "not tested" for each in tests)])
    print_table(["recipe", "score", *(name.replace("fid", "FID") for name in names)], rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
