"""Fits drawn from seeds are killed anywhere, in any way, and end with the files of whole ones.

KILLS=500 pytest -m rare tests/integration/test_random_kills.py             # more of them
KILLS=1 FIRST_SEED=17 pytest -m rare tests/integration/test_random_kills.py     # one again

"""

import os

import pytest
from support.random_kills import main
from support.spawn import spawn

COUNT, FIRST = int(os.environ.get("KILLS", "12")), int(os.environ.get("FIRST_SEED", "0"))
AT_ONCE = 2


@pytest.mark.rare
def test_fits_that_are_killed_anywhere_end_with_the_files_of_undisturbed_ones(tmp_path):
    results = spawn(main, AT_ONCE, tmp_path, FIRST, COUNT, timeout=100 + 100 * COUNT)
    reports = [report for reports in results for report in reports]
    assert len(reports) == COUNT
    assert [report for report in reports if report["differences"]] == []
