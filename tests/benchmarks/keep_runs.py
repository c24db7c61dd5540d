"""Keeps what `lit-diffusion compare` reads of a sweep's finished runs: keep_runs.py SWEEP DEST.

Of each run that reached its last step or diverged: config.yaml (with the run folder relative to
DEST), metrics.csv, evaluations.jsonl, and for the first seed of an arm its last grid of samples.
Without checkpoints, so that results can be committed. With --brief no grid, and of metrics.csv the
losses and FIDs alone, to six digits: for runs that log every step.
"""

import argparse
import csv
import re
import shutil
from pathlib import Path

from lit_diffusion.commands.experiment import Run, find_runs


def finished(run: Run) -> bool:
    """Whether the last step was evaluated, with all of its repeats, or the training diverged."""
    at_end = [record for record in run.records if record["step"] == run.max_steps]
    told = re.search(r"repeats_at_end: (\d+)", (run.path / "config.yaml").read_text())
    return run.diverged or len(at_end) >= 1 + int(told[1] if told else 0)


def write_brief(source: Path, target: Path) -> None:
    with source.open() as lines:
        rows = list(csv.DictReader(lines))
    names = [name for name in rows[0] if re.fullmatch("step|train/loss|val/.*", name)]
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            numbers = [f"{float(row[name]):.6g}" if row[name] else "" for name in names[1:]]
            writer.writerow([row[names[0]], *numbers])


def keep(run: Run, folder: Path, name: str, brief: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = (run.path / "config.yaml").read_text()
    config = re.sub(r"default_root_dir: .*", f"default_root_dir: {name}", config)
    (folder / "config.yaml").write_text(config)
    shutil.copy(run.path / "metrics.csv", folder)
    if brief:
        write_brief(run.path / "metrics.csv", folder / "metrics.csv")
    if (run.path / "evaluations.jsonl").exists():  # not if it diverged before the first
        shutil.copy(run.path / "evaluations.jsonl", folder)
    if run.seed == "0" and run.grids and not brief:
        grid = run.grids[max(run.grids)]
        (folder / "samples").mkdir(exist_ok=True)
        shutil.copy(grid, folder / "samples" / grid.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    for run in find_runs([str(args.sweep)]):
        if finished(run):
            name = run.path.relative_to(args.sweep)
            keep(run, args.destination / name, f"runs/{args.destination.name}/{name}", args.brief)
            print(f"kept {name}")


if __name__ == "__main__":
    main()
