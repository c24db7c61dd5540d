from pathlib import Path

import pytest
from support.experiments import fids, write_arm, write_run

from lit_diffusion.lab.compare.reporting import report_on_runs, report_on_tables

pytestmark = pytest.mark.usefixtures("folder")


def test_run_folders_become_a_report_with_tables_notes_and_pictures():
    write_arm(Path("sweep/baseline"), 1.0, range(3))
    write_arm(Path("sweep/clts"), 2.0, range(3), lr=0.5)
    write_run(Path("sweep/few/seed-0"), fids(3.0, 1), num_fake=100)
    report = report_on_runs(["sweep"], None, None, None)
    assert [arm.name for arm in report.comparison.arms] == ["baseline", "clts"]
    assert [run for run, _ in report.left_out] == ["sweep/few/seed-0"]
    assert {picture.arm for picture in report.samples} == {"baseline", "clts"}
    assert report.tables["What each arm changes"].rows[0][1] == "model.optimizer.lr"
    assert len(report.tables["Runs"].rows) == 6
    assert any(note.startswith("Fewer than 5 seeds") for note in report.notes)
    assert (report.by_images, report.alerts) == (None, [])


def test_baseline_target_and_metric_may_be_chosen():
    write_arm(Path("sweep/a"), 1.0, range(2))
    write_arm(Path("sweep/b"), 2.0, range(2), lr=0.5)
    report = report_on_runs(["sweep"], "b", 4.0, "val/fid_360")
    assert (report.comparison.baseline.name, report.comparison.target) == ("b", 4.0)


def test_a_baseline_that_lost_its_last_fid_is_an_alert():
    for seed in range(2):
        write_run(Path(f"sweep/baseline/seed-{seed}"), [*fids(1.0, seed)[:-1], None], seed)
    write_arm(Path("sweep/clts"), 1.3, range(2), lr=0.5)
    (alert,) = report_on_runs(["sweep"], None, None, None).alerts
    assert alert == "The last FID of the baseline, baseline, is not finite in 2 of 2 seeds."


@pytest.mark.parametrize(("arms", "baseline"), [("ab", "a"), (("a", "baseline"), "baseline")])
def test_of_a_table_the_arm_called_baseline_or_the_first_is_the_baseline(arms, baseline):
    rows = "".join(f"{arm},1,9\n{arm},2,{k + 3}\n" for k, arm in enumerate(arms))
    Path("fids.csv").write_text(f"arm,step,fid\n{rows}")
    report = report_on_tables(["fids.csv"], None, None)
    assert report.comparison.baseline.name == baseline
    assert "how the FIDs were measured is not known" in report.notes[0]
