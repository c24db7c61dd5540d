"""The tables of docs/results/*.md come from the CSV files there, by the commands on the pages.

A figure of a page is a number with what belongs to it: 1.42x [1.32, 1.53], 0.238 +- 0.023, 1,365.
"""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.experiments import fids, write_arm, write_run

from lit_diffusion.lab.compare.command import parser
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.report import build_report, markdown
from lit_diffusion.lab.compare.run_folders import collect_runs, select
from lit_diffusion.lab.compare.run_tables import arms_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
WORDS = ("what it is", "what differs", "what was tried", "reported", "where", "conclusion")
"""Heads of columns without results of ours."""
INTERVAL = re.compile(r"[\d.,]+x? \[[\d. ,-]+\]")
FIGURE = re.compile(r"[\d.,]+x? \[[^]]+\]|[\d.]+ \+- [\d.]+|\d+(?:[.,]\d+)*")

ALIKE = {"digits-ablation": 65, "fast": 19, "atlas": 151, "paper-at-its-regime": 6}
"""Rows that stand as printed; other pages name the commit whose script prints their tables."""


def commands(page: str) -> list[list[str]]:
    """Words of the lines that read a CSV file, in order."""
    text = re.sub(r" \\\n +", " ", page)
    lines = re.findall(
        r"^    ((?:grep|lit-diffusion compare|python).*\.csv.*)$", text, re.MULTILINE
    )
    shell = "".join(f"printf '%s\\t' {line.replace('>', '')}; echo; " for line in lines)
    echo = subprocess.run(["bash", "-c", shell], text=True, capture_output=True, check=True)
    lines = [line.split("\t")[:-1] for line in echo.stdout.splitlines()]
    return [words for words in lines if "runs_to_csv" not in words[1]]


def compared(words: list[str]) -> str:
    """What `lit-diffusion compare` reports."""
    args = parser().parse_args(words)
    return markdown(build_report(args.runs, args.baseline, args.target, only=args.arms))


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """What the commands of a page print."""

    def run(page: str) -> str:
        outputs = []
        for program, *words in commands(page.replace("/tmp/", f"{tmp_path}/")):
            if program == "grep":
                *grep, target = words
                Path(target).write_text(
                    subprocess.run(["grep", *grep], text=True, capture_output=True).stdout
                )
            elif program == "lit-diffusion":
                outputs.append(compared(words[1:]))
            else:
                monkeypatch.setattr(sys, "argv", words)
                runpy.run_path(words[0], run_name="__main__")
                outputs.append(capsys.readouterr().out)
        return "\n".join(outputs)

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "tests/benchmarks")  # as for a script
    return run


def tables(page: str) -> list[list[list[str]]]:
    """Cells of each table, its head first."""
    texts = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    return [[line.strip("| ").split(" | ") for line in text.splitlines()] for text in texts]


def figures(text: str) -> set[str]:
    return set(FIGURE.findall(re.sub(r"\*|[\d.e-]+:", "", text)))


def by_arm(output: str) -> dict[str, str]:
    """The rows of each arm."""
    rows: dict[str, str] = {}
    for line in output.splitlines():
        arm = line.split(" | ")[0].strip("| ")
        rows[arm] = f"{rows.get(arm, '')}{line}\n"
    return rows


@pytest.mark.parametrize("name", ALIKE)
def test_the_tables_of_a_page_come_from_its_csv_files(name, printed):
    page = (RESULTS / f"{name}.md").read_text()
    output = printed(page)
    rows_of, alike = by_arm(output), 0
    for head, _, *rows in tables(page):
        columns = [name for name in head[1:] if not name.startswith(WORDS)]
        for row in rows if columns else ():
            expected = rows_of.get(row[0].strip("*"), output)
            cells = {name: cell for name, cell in zip(head, row, strict=False) if name in columns}
            verdict = [cell.split(" ")[0] for name, cell in cells.items() if "verdict" in name]
            assert figures(" | ".join(cells.values())) <= figures(expected), row
            assert all(word in expected for word in verdict), row
            alike += f"| {' | '.join(row)} |" in output
    assert set(INTERVAL.findall(page.replace("*", ""))) <= set(INTERVAL.findall(output))
    assert alike == ALIKE[name]


README = (ROOT / "README.md").read_text()
MEASURED = re.findall(r"^\* .*(?:\n  .*)*?results/[\w-]+\.md\).*$", README, re.MULTILINE)


def test_the_readme_has_intervals_of_the_pages_that_it_links():
    for item in MEASURED:
        page = re.search(r"results/([\w-]+\.md)", item)[1]
        measured = INTERVAL.findall((RESULTS / page).read_text().replace("*", ""))
        text = item.replace("\\", "").replace("\n  ", " ")
        assert set(INTERVAL.findall(text)) <= set(measured), item
    assert len(MEASURED) == 5


def test_the_readme_has_the_speed_of_the_page_that_it_links():
    (item,) = (item for item in MEASURED if "performance.md" in item)
    speeds = FIGURE.findall(item.replace("performance.md", ""))
    assert speeds
    assert set(speeds) <= set(FIGURE.findall((RESULTS / "performance.md").read_text()))


def test_what_is_kept_of_a_sweep_is_what_is_read_of_its_folders(tmp_path, monkeypatch):
    for arm, speed in {"baseline": 1.0, "fast": 2.0}.items():
        write_arm(tmp_path / "sweep" / arm, speed, seeds=range(2))
    write_run(tmp_path / "sweep/fast/seed-7", fids(2.0, 7)[:8], 7)
    table = tmp_path / "sweep.csv"
    monkeypatch.setattr(sys, "argv", ["runs_to_csv.py", str(tmp_path / "sweep"), str(table)])
    runpy.run_path(str(ROOT / "tests/benchmarks/runs_to_csv.py"), run_name="__main__")
    runs = [run for run in collect_runs([str(tmp_path / "sweep")]) if run.seed != "7"]
    assert read_arms([str(table)]) == arms_of(select(runs))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """What runs_to_csv.py keeps of the runs in `tmp_path`/sweep: FIDs by step, by (arm, seed)."""

    def run():
        table = tmp_path / "sweep.csv"
        monkeypatch.setattr(sys, "argv", ["runs_to_csv.py", str(tmp_path / "sweep"), str(table)])
        runpy.run_path(str(ROOT / "tests/benchmarks/runs_to_csv.py"), run_name="__main__")
        arms = read_arms([str(table)])
        return {
            (a.name, c.seed): dict(zip(c.steps, c.fids, strict=True))
            for a in arms
            for c in a.curves
        }

    return run


def write_diverged_run(folder, seed, values):
    """A run of 1000 steps, evaluated at every 250th, whose training diverged."""
    write_run(folder, values, seed, steps=(250, 500)[: len(values)] or (250,), max_steps=1000)
    (folder / "metrics.csv").write_text("step,train/loss\n0,1.0\n600,nan\n")


def test_an_arm_whose_runs_all_diverged_has_no_fid_at_the_end(tmp_path, kept):
    write_diverged_run(tmp_path / "sweep/hot/seed-0", 0, [5.0, 4.0])
    write_diverged_run(tmp_path / "sweep/hot/seed-1", 1, [5.0])
    write_diverged_run(tmp_path / "sweep/hotter/seed-0", 0, [])
    curves = kept()
    assert [len(curve) for curve in curves.values()] == [3, 3, 3]
    assert all(math.isnan(curve[1000]) for curve in curves.values())
    assert curves["hot", "0"][500] == 4


def test_a_run_that_diverged_at_once_counts_for_each_average_of_its_arm(tmp_path, kept):
    folder = tmp_path / "sweep/hot/seed-0"
    write_run(folder, [5.0, 4.0], 0, steps=(500, 1000))
    other = write_run(tmp_path / "other", [6.0, 5.0], 0, (500, 1000), metric="val/fid_360_raw")
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write((other / "evaluations.jsonl").read_text())
    write_diverged_run(tmp_path / "sweep/hot/seed-1", 1, [])
    curves = kept()
    for arm in ("hot", "hot_raw"):
        assert curves[arm, "0"].keys() == curves[arm, "1"].keys() == {500, 1000}
        assert all(map(math.isnan, curves[arm, "1"].values()))


def test_distances_after_some_steps_are_of_runs_that_reached_them(tmp_path, monkeypatch, capsys):
    script, table = "tests/benchmarks/arms_table.py", tmp_path / "arms.csv"
    rows = ["arm,seed,step,fid,pixels", "long,0,100,8,2", "long,0,300,2,1", "long,1,100,8,2"]
    rows += ["long,1,300,2,1", "short,0,100,4,2", "short,0,150,1,1", "bad,0,100,4,2", "bad,0,300,,"]
    table.write_text("\n".join(rows))
    monkeypatch.setattr(sys, "argv", [script, str(table), "--at", "200"])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    ((head, _, *rows),) = tables(capsys.readouterr().out)
    assert head == ["arm", "FID", "held-out", "pixels", "random-cnn"]
    assert rows == [
        ["long", "4.00 +- 0.00", "-", "1.41 +- 0.00", "-"],
        ["short", "-", "-", "-", "-"],
        ["bad", "not finite", "-", "not finite", "-"],
    ]


@pytest.mark.parametrize(
    ("name", "page", "script"),
    [
        ("performance", "performance", "gpu/table.py"),
        ("performance-2", "performance", "gpu/table.py"),
        ("performance-before", "performance", "gpu/table.py"),
        ("performance-cpu", "performance", "gpu/table.py"),
        ("growth", "growth", "growth_table.py"),
        ("growth-h200", "growth", "growth_table.py"),
    ],
)
def test_the_tables_of_speed_are_of_the_rows_beside_them(name, page, script):
    rows = RESULTS / f"{name}.jsonl"
    command = [sys.executable, ROOT / "tests/benchmarks" / script, rows]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = (RESULTS / f"{page}.md").read_text()
    assert all(table in text for table in output.strip().split("\n\n"))
    assert "|---" in output


def distances(arm: str, factor: float, spread: tuple[float, ...] = (0.9, 1.0, 1.1)) -> list[str]:
    """CSV rows of an arm: one evaluation of each seed."""
    values = [factor * each for each in spread]
    return [f"{arm},{seed},500,{v},{v},{v},{v},0.8,0.3" for seed, v in enumerate(values)]


@pytest.fixture
def atlas_table(tmp_path, monkeypatch, capsys):
    """Rows of the first table that atlas_table.py prints, by arm; the last cell is p."""

    def run(rows: list[str], *arms: str) -> dict[str, list[str]]:
        head = "arm,seed,step,fid,held-out,pixels,random-cnn,recall,memorized"
        (tmp_path / "atlas-x.csv").write_text("\n".join([head, *rows]))
        script = "tests/benchmarks/atlas_table.py"
        monkeypatch.syspath_prepend(ROOT / "tests/benchmarks")  # as for a script
        monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "atlas-x.csv"), *arms])
        runpy.run_path(str(ROOT / script), run_name="__main__")
        first = tables(capsys.readouterr().out)[0]
        return {row[0]: row for row in first[2:]}

    return run


def test_the_atlas_divides_scores_by_the_control_and_by_the_baseline(atlas_table):
    rows = [*distances("baseline", 1.0), *distances("simple", 2.0)]
    arm = distances("simple+info-noise", 1.2, (1.0, 1.1, 0.9))
    row = atlas_table([*rows, *arm])["simple+info-noise"]
    assert row[1] == "simple"
    assert [cell.split(" ")[0] for cell in row[2:]] == [
        "0.60",
        "1.20",
        "1.20",
        "1.20",
        "1.20",
        "1.20",
    ]


def test_the_atlas_confirms_an_arm_that_beats_both_learning_rates_of_its_control(atlas_table):
    worse, better = (1.2, 1.3, 1.5), (0.5, 0.6, 0.8)  # not proportional, or paired tests have p = 0
    rows = [*distances("baseline", 1.0), *distances("baseline at its second lr", 1.0, worse)]
    arms = [*distances("muon", 0.7), *distances("x0", 0.5, (0.9, 1.0, 1.2))]
    alone, both = (atlas_table([*rows, *arms], *names) for names in (["x0"], ["muon", "x0"]))
    assert float(alone["x0"][-2]) < float(both["x0"][-2])  # Holm's correction
    assert float(alone["x0"][-1]) < 1
    rows = [*distances("baseline", 1.0), *distances("baseline at its second lr", 1.0, better)]
    assert atlas_table([*rows, *arms], "muon")["muon"][-2] == "-"


def test_the_atlas_needs_both_learning_rates_for_a_confirmation(atlas_table):
    with pytest.raises(SystemExit, match="no rows of baseline at its second lr"):
        atlas_table([*distances("baseline", 1.0), *distances("x0", 0.6)], "x0")


def test_a_diverged_run_of_the_atlas_is_not_tested(atlas_table):
    rows = [
        *distances("baseline", 1.0),
        *distances("muon", 0.5),
        "x0,0,500,,,,,,",
        "x0,1,500,1,1,1,1,1,1",
    ]
    row = atlas_table(rows)["x0"]
    assert row[2:] == ["not tested"] * 6


@pytest.fixture
def atlas_functions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/benchmarks")  # as for a script
    return runpy.run_path(str(ROOT / "tests/benchmarks/atlas_table.py"))


def test_a_claim_that_cannot_be_tested_is_open(atlas_functions, monkeypatch, capsys):
    def arm(name, *fids):
        return Arm(name, tuple(Curve(str(i), (500,), (fid,)) for i, fid in enumerate(fids)))

    baseline = arm("baseline", 1.0, 1.1)
    lengths = {500: baseline, 1000: arm("baseline", 0.5, 0.5)}
    pairs = [(arm("muon", 0.5, math.nan), baseline), (arm("p2", 0.8, 0.9), baseline)]
    atlas_functions["claims_table"](pairs, lengths, {"muon": 1.0, "p2": 1.0})
    ((_, _, muon, p2),) = tables(capsys.readouterr().out)
    assert muon == ["muon", "baseline", "2", "1.35x", "not tested", "-", "-", "-", "open"]
    assert p2[0] == "p2"


@pytest.mark.parametrize(
    ("p", "low", "high", "reported", "verdict"),
    [
        (0.04, 1.1, 1.5, 1.4, "holds"),
        (0.04, 1.1, 1.3, 1.4, "smaller"),
        (0.04, 1.1, 1.3, None, "faster"),
        (0.06, 1.1, 1.5, 1.4, "open"),
        (0.06, 0.9, 1.3, 1.4, "excluded"),
        (0.06, 0.9, 1.3, None, "open"),
        (0.04, 0.7, 0.9, 1.4, "slower"),
        (None, 0.7, 0.9, 1.4, "excluded"),
    ],
)
def test_verdicts_of_the_atlas(atlas_functions, p, low, high, reported, verdict):
    assert atlas_functions["verdict"](p, low, high, reported) == verdict


def test_an_arm_as_good_as_a_longer_run_of_the_baseline_has_its_speedup(atlas_functions):
    fid_of = {250: 0.8, 500: 0.5, 1000: 0.25, 2000: 0.1}
    curves = {steps: Curve("0", (steps,), (fid,)) for steps, fid in fid_of.items()}
    lengths = {steps: Arm("baseline", (curve,)) for steps, curve in curves.items()}
    for steps, fid in fid_of.items():
        for start, other in fid_of.items():
            length = atlas_functions["equal_length"](lengths, start, math.log(fid / other))
            assert length == pytest.approx(steps)
    between = math.log(math.sqrt(0.25 * 0.5) / 0.5)  # halfway from 500 to 1000 steps
    length = atlas_functions["equal_length"](lengths, 500, between)
    assert length == pytest.approx(500 * math.sqrt(2))
