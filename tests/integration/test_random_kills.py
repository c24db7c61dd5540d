"""Fits drawn from seeds are killed anywhere, in any way, and end with the files of whole ones.

    KILLS=500 pytest -m slow tests/integration/test_random_kills.py             # more of them
    KILLS=1 FIRST_SEED=17 pytest -m slow tests/integration/test_random_kills.py     # one again

The folder of a fit that ends otherwise is left in pytest's temporary folder: fit.yaml, the
undisturbed run `whole`, the other one `run`, and what both said, in life.log.
"""

import json
import os
import shutil

import pytest
from support.forked_ranks import Forker

COUNT, FIRST = int(os.environ.get("KILLS", "8")), int(os.environ.get("FIRST_SEED", "0"))


@pytest.mark.slow
@pytest.mark.system
def test_fits_that_are_killed_anywhere_end_with_the_files_of_undisturbed_ones(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unlike = {}
    with Forker() as forker:
        for seed in range(FIRST, FIRST + COUNT):
            folder = tmp_path / str(seed)
            folder.mkdir()
            [end] = forker.run("support.random_kills:main", folder, 1, str(seed), limit=300)
            assert end.code == 0, (seed, end.said)
            report = json.loads((folder / "rank0.json").read_text())
            print(report, flush=True)
            if report["differences"]:
                unlike[seed] = report
            else:
                shutil.rmtree(folder)
    assert unlike == {}
