"""Fits drawn from seeds are killed anywhere, in any way, and end with the files of whole ones.

    KILLS=500 pytest -m slow tests/integration/test_random_kills.py             # more of them
    KILLS=1 FIRST_SEED=17 pytest -m slow tests/integration/test_random_kills.py     # one again

What each ended with is in rank0.log of the test's temporary folder, and rank1.log, meanwhile.
"""

import os

import pytest
from support.forked_ranks import Forker

COUNT, FIRST = int(os.environ.get("KILLS", "12")), int(os.environ.get("FIRST_SEED", "0"))
AT_ONCE = 2


@pytest.mark.slow
@pytest.mark.system
def test_fits_that_are_killed_anywhere_end_with_the_files_of_undisturbed_ones(tmp_path):
    function, given = "support.random_kills:main", (str(FIRST), str(COUNT))
    with Forker() as forker:
        found = forker.results(function, tmp_path, AT_ONCE, *given, limit=100 + 100 * COUNT)
    reports = [report for reports in found for report in reports]
    assert len(reports) == COUNT
    assert [report for report in reports if report["differences"]] == []
