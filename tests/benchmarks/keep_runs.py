"""Keeps what `lit-diffusion compare` reads of a sweep's finished runs: keep_runs.py SWEEP DEST.

Of each run that reached its last step: config.yaml (with the run folder relative to DEST),
metrics.csv, evaluations.jsonl, and for the first seed of an arm its last grid of samples. Without
checkpoints, so that results can be committed.
"""

import argparse
import re
import shutil
from pathlib import Path

from lit_diffusion.commands.experiment import Run, find_runs


def finished(run: Run) -> bool:
    """Whether the last step was evaluated, with all of its repeats."""
    at_end = [record for record in run.records if record["step"] == run.max_steps]
    told = re.search(r"repeats_at_end: (\d+)", (run.path / "config.yaml").read_text())
    return len(at_end) >= 1 + int(told[1] if told else 0)


def keep(run: Run, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = (run.path / "config.yaml").read_text()
    config = re.sub(r"default_root_dir: .*", f"default_root_dir: {name}", config)
    (folder / "config.yaml").write_text(config)
    for file in ("metrics.csv", "evaluations.jsonl"):
        shutil.copy(run.path / file, folder / file)
    if run.seed == "0" and run.grids:
        grid = run.grids[max(run.grids)]
        (folder / "samples").mkdir(exist_ok=True)
        shutil.copy(grid, folder / "samples" / grid.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("destination", type=Path)
    args = parser.parse_args()
    for run in find_runs([str(args.sweep)]):
        if finished(run):
            name = run.path.relative_to(args.sweep)
            keep(run, args.destination / name, f"runs/{args.destination.name}/{name}")
            print(f"kept {name}")


if __name__ == "__main__":
    main()
