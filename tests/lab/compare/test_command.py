import csv
import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from support.commands import call
from support.experiments import STEPS, fids, write_arm, write_run
from support.golden import FOLDER

from lit_diffusion.cli.loggers import AppendingCSVLogger


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A winner, noise, a loser, an arm that never gets there, and runs that cannot be compared.

    In the folder around `sweep` is the report on it.
    """
    root = tmp_path_factory.mktemp("shared")
    for arm, speed in {"baseline": 1, "fast": 2, "same": 1.02, "slow": 0.8, "stuck": 0.4}.items():
        write_arm(root / "sweep" / arm, float(speed), lr=1e-3 * speed)
    write_run(root / "sweep/fast/seed-7", fids(2.0, 7)[:8], 7, lr=2e-3)
    write_run(root / "sweep/few/seed-0", fids(3.0, 1), 0, num_fake=100)
    (root / "sweep/dead/seed-0").mkdir(parents=True)
    (root / "sweep/dead/seed-0/config.yaml").write_text("seed_everything: 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert call("compare sweep") == 0
    (root / "printed.txt").write_text(printed.getvalue())
    return root


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def sweep(shared, tmp_path):
    (tmp_path / "sweep").symlink_to(shared / "sweep")


@pytest.fixture
def report(shared, tmp_path):
    shutil.copytree(shared / "report", tmp_path / "report")


def rows(name):
    with open(name, newline="") as file:
        return {row["arm"]: row for row in csv.DictReader(file)}


def test_a_sweep_is_compared_and_printed_as_one_sentence_and_one_table(shared, report):
    lines = (shared / "printed.txt").read_text().splitlines()
    assert lines[0].startswith("fast wins: 2.")
    assert any(line.startswith("| same | 5 of 5 |") for line in lines)
    assert sum(line.startswith("Left out: sweep/") for line in lines) == 3
    assert lines[-1] == "Report: report/report.html"
    verdicts = {name: row["verdict"] for name, row in rows("report/speedups.csv").items()}
    assert verdicts == {
        "baseline": "baseline",
        "fast": "faster",
        "same": "no difference shown",
        "slow": "slower",
        "stuck": "slower",
    }
    results = rows("report/speedups.csv")
    assert (results["stuck"]["reached"], results["stuck"]["bound"]) == ("0", ">")
    assert float(results["fast"]["low"]) < 2 < float(results["fast"]["high"])


def test_runs_that_take_no_part_are_named_on_the_page_and_in_no_number(report):
    page, text = (Path(f"report/report.{kind}").read_text() for kind in ("html", "md"))
    for name in ("sweep/fast/seed-7", "sweep/few/seed-0", "sweep/dead/seed-0"):
        assert name in page
        assert name in text
    assert "num_fake 100, not 360" in text
    assert rows("report/speedups.csv")["fast"]["seeds"] == "5"
    assert "few" not in rows("report/speedups.csv")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("paper_table2.csv", {"GD+Ours": "2.11", "Min-SNR": "1.24"}),
        ("paper_table3.csv", {"ID+Ours": "1.94", "FDM": "1.69"}),
    ],
)
def test_numbers_of_a_paper_are_compared_from_a_table(table, expected, capsys):
    assert call(f"compare {FOLDER / table} --out report") == 0
    results = rows("report/speedups.csv")
    assert {arm: f"{float(results[arm]['speedup']):.2f}" for arm in expected} == expected
    assert capsys.readouterr().out.startswith("No arm is shown to win")
    assert {row["verdict"] for row in results.values()} == {"baseline", "not tested"}
    assert "how the FIDs were measured is not known" in Path("report/report.md").read_text()


def test_the_curves_of_a_report_can_be_compared_again(report):
    assert call("compare report/curves.csv --out made/again") == 0
    assert rows("made/again/speedups.csv") == rows("report/speedups.csv")


@pytest.mark.parametrize("runs", ["sweep", "report/curves.csv"])
def test_arms_may_be_chosen(sweep, report, runs):
    assert call(f"compare {runs} --arms baseline slow --out made") == 0
    assert list(rows("made/speedups.csv")) == ["baseline", "slow"]
    assert (
        rows("made/speedups.csv")["slow"]["at_fid"] == rows("report/speedups.csv")["slow"]["at_fid"]
    )


def test_baseline_and_target_may_be_chosen(sweep):
    assert call("compare sweep --baseline slow --target 4.0") == 0
    results = rows("report/speedups.csv")
    assert float(results["baseline"]["speedup"]) > 1
    assert results["slow"]["verdict"] == "baseline"
    assert {row["target"] for row in results.values()} == {"4"}


def test_arms_of_another_batch_size_are_compared_by_images_too(capsys):
    write_arm(Path("sweep/baseline"), 1.0)
    write_arm(Path("sweep/large"), 1.5)
    for path in Path("sweep/large").glob("*/evaluations.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps(r | {"images": 128 * r["step"]}) + "\n" for r in records)
        )
    assert call("compare sweep") == 0
    assert "images per step" in capsys.readouterr().out
    ratio = float(rows("report/speedups.csv")["large"]["speedup"])
    assert float(rows("report/speedups-images.csv")["large"]["speedup"]) == pytest.approx(ratio / 2)


def test_losses_are_compared_where_that_is_asked(capsys):
    for arm, speed in (("baseline", 1.0), ("fast", 2.0)):
        for seed in range(5):
            folder = write_run(Path("losses", arm, f"seed-{seed}"), [1.0] * len(STEPS), seed)
            (folder / "evaluations.jsonl").unlink()
            (folder / "metrics.csv").unlink()
            logger = AppendingCSVLogger(folder)
            for step, loss in zip(STEPS, fids(speed, f"{arm}{seed}"), strict=True):
                logger.log_metrics({"val/loss": loss}, step=step - 1)
    assert call("compare losses") == 2
    assert "none of these runs has an FID" in capsys.readouterr().err
    assert call("compare losses --metric val/loss") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fast wins: ")
    assert "Lower loss is better" in printed
    page = re.sub(r"data:image[^\"]*", "", Path("report/report.html").read_text())
    text = Path("report/report.md").read_text()
    assert "## loss over training" in text
    results = [printed, *(each.partition("How this was computed")[0] for each in (text, page))]
    assert not any("FID" in result for result in results)
    fast = rows("report/speedups.csv")["fast"]
    assert float(fast["low"]) < 2 < float(fast["high"])


def test_a_metric_that_cannot_be_compared_is_told_with_what_is_there(capsys):
    for arm in ("baseline", "fast"):
        path = Path("losses", arm, "seed-0")
        path.mkdir(parents=True)
        (path / "metrics.csv").write_text("step,val/loss\n9,0.5\n19,abc\n")
    assert call("compare losses --metric val/los") == 2
    assert "it has no val/los, but val/loss" in capsys.readouterr().err
    assert call("compare losses --metric val/loss") == 2
    assert "abc" in capsys.readouterr().err


def test_notes_are_printed(capsys):
    write_arm(Path("sweep/baseline"), 1.0)
    write_arm(Path("sweep/more-steps"), 2.0, sampling={"solver": "DDPM()", "steps": 250})
    write_run(Path("sweep/lost/seed-0"), [*fids(1.0, 0)[:-1], None], 0)
    assert call("compare sweep") == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note: ")]
    assert any("more-steps" in note and "steps 250, not 20" in note for note in notes)
    assert any("without a finite last FID: 1 of lost" in note for note in notes)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("evaluations.jsonl", '{"metric": "val/fid'),
        ("metrics.csv", "garb,age"),
        ("config.yaml", "a: ["),
    ],
)
def test_a_run_with_a_broken_line_is_left_out_by_name(capsys, file, line):
    write_arm(Path("sweep/baseline"), 1.0, range(2))
    write_arm(Path("sweep/fast"), 1.5, range(3), lr=2e-3)
    path = Path("sweep/fast/seed-1") / file
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *others]) + "\n")
    assert call("compare sweep") == 0
    message = capsys.readouterr().out
    assert f"Left out: sweep/fast/seed-1: {path} is " in message
    assert rows("report/speedups.csv")["fast"]["seeds"] == "2"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare", "RUN must be given."),
        ("compare nowhere", "there is no run folder nowhere."),
        ("compare nowhere.csv", "No such file or directory: 'nowhere.csv'"),
        ("compare sweep file.csv", "give either run folders or CSV files"),
        ("compare sweep --out file.csv", "--out file.csv is a file; name a folder."),
        ("compare sweep --baseline x", "no arm 'x' with an FID for --baseline"),
        ("compare sweep --arms fast x", "--arms: there is no x; there are baseline, dead,"),
        ("compare sweep --target nine", "argument --target: invalid float value: 'nine'"),
        ("compare sweep --target -1", "the target must be a positive FID, got -1."),
        ("compare sweep/fast", "what is left is fast."),
    ],
)
def test_a_mistake_is_told_in_one_message_and_leaves_nothing(sweep, capsys, command, message):
    Path("file.csv").write_text("arm,step,fid\n")
    assert call(command) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert not Path("report").exists()


@pytest.mark.parametrize("code", ["command.parser()", "command"])
def test_help_imports_nothing_heavy(code):
    program = (
        f"import sys; from lit_diffusion.lab.compare import command; {code};"
        "print({'torch', 'lightning', 'matplotlib', 'scipy'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "set()"
