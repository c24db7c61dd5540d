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
from PIL import Image
from support.browser import CHROMIUM, look, screenshot
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
        told = io.StringIO()
        with redirect_stdout(told):
            assert call("compare sweep") == 0
    (root / "told.txt").write_text(told.getvalue())
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


def test_a_sweep_is_compared_and_told_in_a_few_lines(shared, report):
    told = (shared / "told.txt").read_text().splitlines()
    assert told[0].startswith("fast wins: 2.")
    assert told[0].endswith("x as fast as baseline. That is not noise.")
    assert any(line.startswith("  same: no difference that 5 seeds can show") for line in told)
    assert sum(line.startswith("Left out: sweep/") for line in told) == 3
    assert told[-1] == "Report: report/report.html"
    found = rows("report/speedups.csv")
    assert {name: row["verdict"] for name, row in found.items()} == {
        "baseline": "baseline",
        "fast": "faster",
        "same": "no difference shown",
        "slow": "slower",
        "stuck": "slower",
    }
    assert (found["stuck"]["reached"], found["stuck"]["bound"]) == ("0", ">")
    assert float(found["fast"]["low"]) < 2 < float(found["fast"]["high"])


def test_runs_that_take_no_part_are_named_on_the_page_and_in_no_number(report):
    page, text = (Path(f"report/report.{kind}").read_text() for kind in ("html", "md"))
    for name in ("sweep/fast/seed-7", "sweep/few/seed-0", "sweep/dead/seed-0"):
        assert name in page
        assert name in text
    assert "num_fake 100, not 360" in text
    assert rows("report/speedups.csv")["fast"]["seeds"] == "5"
    assert "few" not in rows("report/speedups.csv")


def test_comparing_again_makes_the_same_report_in_its_place(sweep, report):
    first = Path("report/report.html").read_bytes()
    assert call("compare sweep") == 0
    assert Path("report/report.html").read_bytes() == first


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("paper_table2.csv", {"GD+Ours": "2.11", "Min-SNR": "1.24"}),
        ("paper_table3.csv", {"ID+Ours": "1.94", "FDM": "1.69"}),
    ],
)
def test_numbers_of_a_paper_are_compared_from_a_table(table, expected, capsys):
    assert call(f"compare {FOLDER / table} --out report") == 0
    found = rows("report/speedups.csv")
    assert {arm: f"{float(found[arm]['speedup']):.2f}" for arm in expected} == expected
    told = capsys.readouterr().out
    assert "2 arms cannot be told from noise (one seed), of which " in told
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
    found = rows("report/speedups.csv")
    assert float(found["baseline"]["speedup"]) > 1
    assert found["slow"]["verdict"] == "baseline"
    assert {row["target"] for row in found.values()} == {"4"}


def test_arms_of_another_batch_size_are_compared_by_images_too(capsys):
    write_arm(Path("sweep/baseline"), 1.0)
    write_arm(Path("sweep/large"), 1.5)
    for path in Path("sweep/large").glob("*/evaluations.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps(r | {"images": 128 * r["step"]}) + "\n" for r in records)
        )
    assert call("compare sweep") == 0
    assert "in place of steps, of large: slower" in capsys.readouterr().out
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
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("fast wins: ")
    assert "a loss, as val/loss, compares arms of one objective" in "".join(told)
    page = Path("report/report.html").read_text()
    text = Path("report/report.md").read_text()
    assert "## loss over training" in text
    for said in ("\n".join(told), text, re.sub(r"data:image[^\"]*", "", page)):
        assert "FID" not in said.replace("FIDEvaluation", "")
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


def test_what_a_reader_should_bear_in_mind_is_printed_and_not_on_the_page_alone(capsys):
    write_arm(Path("sweep/baseline"), 1.0)
    write_arm(Path("sweep/more-steps"), 2.0, sampling={"solver": "DDPM()", "steps": 250})
    assert call("compare sweep") == 0
    told = capsys.readouterr().out.splitlines()
    (note,) = [line for line in told if line.startswith("Note: more-steps draws its samples")]
    assert "steps 250, not 20" in note
    assert sum("a gain may be the sampler" in line for line in told) == 1
    assert told[-1].startswith("Report: ")


@pytest.mark.parametrize("of_tables", [False, True])
def test_a_baseline_that_was_lost_stands_beside_the_headline(of_tables, capsys):
    for seed in range(5):
        write_run(Path(f"sweep/baseline/seed-{seed}"), [*fids(1.0, seed)[:-1], None], seed)
    write_arm(Path("sweep/clts"), 1.3)
    assert call("compare sweep") == 0
    if of_tables:
        assert call("compare report/curves.csv --out again") == 0
    *_, alert = [x for x in capsys.readouterr().out.splitlines() if "is not finite in" in x][:1]
    assert alert == "The last FID of the baseline, baseline, is not finite in 5 of 5 seeds."


def test_a_long_note_is_printed_in_short(capsys):
    for k in range(20):
        write_run(Path(f"sweep/arm-number-{k}/seed-0"), fids(1.0, k))
    assert call("compare sweep") == 0
    told = capsys.readouterr().out.splitlines()
    (note,) = [line for line in told if line.startswith("Note: Fewer than 5 seeds")]
    assert len(note) <= 200
    assert note.endswith(" ... (see the report)")


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
    told = capsys.readouterr().out
    assert f"Left out: sweep/fast/seed-1: {path} is " in told
    assert rows("report/speedups.csv")["fast"]["seeds"] == "2"


def test_runs_of_which_none_can_be_read_are_refused(capsys):
    write_arm(Path("sweep/baseline"), 1.0, range(2))
    for path in Path("sweep").rglob("evaluations.jsonl"):
        path.write_text("[1\n")
    assert call("compare sweep") == 2
    told = capsys.readouterr().err
    assert "none of these runs can be read. The first: sweep/baseline/seed-0/evaluations" in told


def test_a_target_that_all_have_at_once_tells_nothing(sweep, capsys):
    assert call("compare sweep --target 1000") == 0
    assert "4 arms cannot be told from noise (the FID was reached before the first" in (
        capsys.readouterr().out
    )
    assert "| 5 of 5 | <= 100 |" in Path("report/report.md").read_text()


@pytest.mark.parametrize(
    ("command", "told"),
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
        ("compare sweep/fast", "only the arm fast is left"),
    ],
)
def test_a_mistake_is_told_in_one_message_and_leaves_nothing(sweep, capsys, command, told):
    Path("file.csv").write_text("arm,step,fid\n")
    assert call(command) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "Traceback" not in said.err
    assert not Path("report").exists()


def test_help_tells_what_it_compares(capsys):
    assert call("compare --help") == 0
    told = capsys.readouterr().out
    for words in ("lit-diffusion compare runs/digits-sweep", "five seeds", "--target FID", "CSV"):
        assert words in told


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


# With a person's eyes


@pytest.fixture
def page(report):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    return Path("report/report.html")


@pytest.mark.system
def test_the_first_screen_has_the_sentence_in_big_type_and_the_whole_forest_plot(page):
    found = look(page)
    assert found["title"].startswith("fast wins: 2.")
    assert found["titleSize"] >= 36
    assert found["titleBox"][0] >= 0
    assert found["figureBox"][0] > found["titleBox"][1]
    assert found["figureBox"][1] < found["fold"]
    assert found["figureBox"][2] > 800


@pytest.mark.system
@pytest.mark.parametrize("width", [1280, 500])
def test_every_picture_is_shown_nothing_is_cut_off_and_nothing_is_fetched(page, width):
    found = look(page, width)
    assert len(found["pictures"]) == 3  # speed-ups, curves, samples
    assert all(complete and natural > 0 and alt for complete, natural, alt in found["pictures"])
    assert found["width"] <= found["window"]
    assert found["loaded"] == []


@pytest.mark.system
def test_a_screenshot_is_mostly_white_and_shows_each_colour_of_a_verdict(page, tmp_path):
    screenshot(page, tmp_path / "shot.png")
    with Image.open(tmp_path / "shot.png") as image:
        colors = {color: count for count, color in image.convert("RGB").getcolors(2**24)}
    assert colors[255, 255, 255] > 0.5 * 1280 * 900
    for verdict in ((0x00, 0x73, 0x4C), (0xB3, 0x40, 0x0B), (0x5C, 0x67, 0x73)):
        assert colors.get(verdict, 0) > 50
