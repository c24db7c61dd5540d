import json
import math
import shutil
from pathlib import Path

import pytest
from support.experiments import fids, record, write_run

from lit_diffusion.lab.compare.ema_widths import TITLE, at_own_best, fids_by_width, judge
from lit_diffusion.lab.compare.found_runs import Run, find_runs
from lit_diffusion.lab.compare.reporting import report_on_runs
from lit_diffusion.lab.compare.selection import select
from lit_diffusion.metrics.evaluation_record import EMA_CURVE

pytestmark = pytest.mark.usefixtures("folder")

FIDS = {
    "baseline": [{0.05: 2.0, 0.1: 1.0}, {0.05: 2.2, 0.1: 1.1}, {0.05: 2.1, 0.1: 1.05}],
    "fast": [{0.05: 0.5, 0.1: 0.9}, {0.05: 0.55, 0.1: 0.9}, {0.05: 0.6, 0.1: 0.9}],
}


def write_widths(run, found, step=2000, **changes):
    lines = [record(step, v, weights=f"power_{w:g}", **changes) for w, v in found.items()]
    with (run / EMA_CURVE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_sweep(measured=FIDS):
    for k, arm in enumerate(("baseline", "fast")):
        for seed in range(3):
            run = write_run(Path(f"sweep/{arm}/seed-{seed}"), fids(1.0, seed), seed, lr=1.0 + k)
            write_widths(run, measured[arm][seed])


def judged():
    return judge(select(find_runs(["sweep"])))


def test_each_seed_is_judged_at_the_width_that_the_others_choose():
    lucky = [{0.05: 1.0, 0.1: 2.0}, {0.05: 3.0, 0.1: 2.0}, {0.05: 3.0, 0.1: 2.0}]
    assert at_own_best(lucky) == [(0.1, 2.0), (0.05, 3.0), (0.05, 3.0)]
    assert at_own_best(lucky[:1]) == [(0.05, 1.0)]
    two = [{0.05: 1.0, 0.1: 2.0}, {0.05: 4.0, 0.1: 3.0, 0.2: 0.1}]  # not all have 0.2
    assert at_own_best(two) == [(0.1, 2.0), (0.05, 4.0)]


def test_arms_are_compared_at_their_own_widths_in_table_and_alert():
    write_sweep()
    table, (told,) = judged()
    means = [math.prod(fids) ** (1 / 3) for fids in ((1.0, 1.1, 1.05), (0.5, 0.55, 0.6))]
    base, fast = table.rows
    assert base[:5] == ("baseline", "0.1 (end)", "0.05, 0.1", "3", f"{means[0]:.2f}")
    assert fast[:2] == ("fast", "0.05 (end)")
    assert fast[4:] == (f"{means[1]:.3f}", f"{means[1] / means[0]:.2f}", "0.002")
    assert told.startswith(f"{TITLE}: baseline FID 1.05 at 0.1 (end); fast FID 0.548 at 0.05")
    assert told.endswith("fast 0.52 of baseline's (p = 0.002).")
    report = report_on_runs(["sweep"], None, None, None)
    assert (report.tables[TITLE], told in report.warnings) == (table, True)


def test_how_sure_it_is_is_said():
    write_sweep(
        {
            arm: [{w: f * 1.001**k for w, f in found[0].items()} for k in range(3)]
            for arm, found in FIDS.items()
        }
    )
    assert judged()[1][0].endswith("fast 0.50 of baseline's (p < 0.001).")
    for arm in FIDS:
        for seed in (1, 2):
            shutil.rmtree(f"sweep/{arm}/seed-{seed}")
    assert judged()[1][0].endswith("fast 0.50 of baseline's (not tested).")


def test_a_width_within_those_scored_is_no_end():
    write_sweep({arm: [f | {0.01: 9.0, 0.2: 9.0} for f in found] for arm, found in FIDS.items()})
    assert [row[1] for row in judged()[0].rows] == ["0.1", "0.05"]


@pytest.mark.parametrize(
    "changes", [{"step": 1900}, {"seeds": (360, 720)}, {"num_fake": 100}, {"data": "0" * 16}]
)
def test_an_arm_that_was_scored_otherwise_is_not_judged(changes):
    write_sweep()
    (Path("sweep/fast/seed-1") / EMA_CURVE).unlink()
    write_widths(Path("sweep/fast/seed-1"), FIDS["fast"][1], **changes)
    table, (told,) = judged()
    assert (table, told.split(".")[0]) == (None, f"{TITLE}, not judged: fast")


def test_without_such_scores_nothing_is_said():
    write_sweep()
    for file in Path("sweep").rglob(EMA_CURVE):
        file.unlink()
    assert judged() == (None, [])


def test_the_last_step_counts_as_most_widths_of_it_were_measured():
    run = write_run(Path("one"), fids(1.0, 0))
    write_widths(run, {0.05: 9.0, 0.1: 9.0, 0.2: 9.0}, step=100)
    write_widths(run, {0.05: 1.0, 0.1: 2.0})
    write_widths(run, {0.05: 7.0}, sampling={"steps": 5})
    how, found = fids_by_width(Run(run))
    assert (how["step"], found) == (2000, {0.05: 1.0, 0.1: 2.0})


def test_a_broken_file_is_a_fault():
    run = write_run(Path("one"), fids(1.0, 0))
    (run / EMA_CURVE).write_text("[]\n")
    assert "ema-curve.jsonl is broken" in Run(run).fault
