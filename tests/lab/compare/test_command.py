import csv
import re
from pathlib import Path

import pytest
from support.commands import call
from support.experiments import STEPS, fids, write_arm, write_run

from lit_diffusion.cli.loggers import AppendingCSVLogger

pytestmark = pytest.mark.usefixtures("folder")


def rows(name):
    with open(name, newline="") as file:
        return {row["arm"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_sweep_is_compared_and_printed_as_one_sentence_and_one_table(capsys):
    """A winner, a loser, an arm without a last FID, and a run that cannot be compared."""
    for arm, speed in {"baseline": 1.0, "fast": 2.0, "slow": 0.5}.items():
        write_arm(Path("sweep", arm), speed, lr=1e-3 * speed)
    write_run(Path("sweep/lost/seed-0"), [*fids(1.0, 0)[:-1], None], 0)
    Path("sweep/dead/seed-0").mkdir(parents=True)
    Path("sweep/dead/seed-0/config.yaml").write_text("seed_everything: 0\n")
    assert call("compare sweep") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fast wins: it is 2.")
    assert any(line.startswith("| slow | 0 of 5 |") for line in lines)
    assert "- Seeds without a finite last FID: 1 of lost." in lines
    assert lines[-1] == "Report: report/report.html"
    for text in (
        "\n".join(lines),
        *(Path(f"report/report.{k}").read_text() for k in ("html", "md")),
    ):
        assert "Left out: sweep/dead/seed-0: it has no FID" in text
    results = rows("report/speedups.csv")
    assert {name: row["verdict"] for name, row in results.items()} == {
        **{"baseline": "baseline", "fast": "faster", "lost": "not tested", "slow": "slower"}
    }
    assert float(results["fast"]["low"]) < 2 < float(results["fast"]["high"])

    assert call("compare report/curves.csv --out new/again") == 0
    assert rows("new/again/speedups.csv") == results
    before = Path("report/curves.csv").read_bytes()
    assert call("compare report/curves.csv --arms baseline slow --out report") == 2
    assert Path("report/curves.csv").read_bytes() == before
    for runs in ("sweep", "report/curves.csv"):
        assert call(f"compare {runs} --arms baseline slow --out new") == 0
        assert list(rows("new/speedups.csv")) == ["baseline", "slow"]
        assert rows("new/speedups.csv")["slow"]["at_fid"] == results["slow"]["at_fid"]


@pytest.fixture
def two_arms():
    for arm, speed in (("baseline", 1.0), ("slow", 0.8)):
        for seed in range(2):
            write_run(Path(f"sweep/{arm}/seed-{seed}"), fids(speed, seed), seed)


def test_losses_are_compared_where_that_is_asked(capsys):
    for arm, speed in (("baseline", 1.0), ("fast", 2.0)):
        for seed in range(3):
            logger = AppendingCSVLogger(Path("losses", arm, f"seed-{seed}"))
            for step, loss in zip(STEPS, fids(speed, f"{arm}{seed}"), strict=True):
                logger.log_metrics({"val/loss": loss}, step=step - 1)
    for option, rule in (("", "has an FID"), ("--metric val/los", "no val/los, but val/loss")):
        assert call(f"compare losses {option}") == 2
        assert rule in capsys.readouterr().err
    assert call("compare losses --metric val/loss") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fast wins: ")
    assert "Lower loss is better" in printed
    page = re.sub(r"data:image[^\"]*", "", Path("report/report.html").read_text())
    results = [printed, page.partition("How this was computed")[0]]
    assert not any("FID" in result for result in results)
    fast = rows("report/speedups.csv")["fast"]
    assert float(fast["low"]) < 2 < float(fast["high"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare", "RUN must be given."),
        ("compare nowhere", "there is no run folder nowhere."),
        ("compare sweep file.csv", "pass either run folders or CSV files"),
        ("compare sweep --out file.csv", "--out file.csv is a file; name a folder."),
        ("compare sweep --arms fast x", "--arms: there is no fast, x; there are baseline, slow."),
    ],
)
def test_a_mistake_ends_with_one_message_and_leaves_nothing(two_arms, capsys, command, message):
    Path("file.csv").write_text("arm,step,fid\n")
    assert call(command) == 2
    assert message in capsys.readouterr().err
    assert not Path("report").exists()
