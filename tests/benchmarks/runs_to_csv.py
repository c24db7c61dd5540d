"""Keep the FIDs of a sweep's finished runs as one table: runs_to_csv.py SWEEP FILE.csv [--losses].

A row an evaluation, as `lit-diffusion compare FILE.csv` reads it; a run whose training diverged has
no FID from then on. Where runs have FIDs of several averages, each average is an arm of its own.
With --losses each row also says how steady the training losses of its run were: every how many
steps they were logged, how often they spiked, and whether they diverged.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_diffusion.lab.compare.curves import Arm, loss_stability
from lit_diffusion.lab.compare.run_folders import Run, collect_runs
from lit_diffusion.lab.compare.tables import curve_records, to_csv

Row = dict[str, Any]


def metrics(run: Run) -> list[str]:
    return list(dict.fromkeys(str(record["metric"]) for record in run.records))


def finished(run: Run) -> bool:
    """Whether the last step was evaluated with all of its repeats, or the training diverged."""
    at_end = [record for record in run.records if record["step"] == run.max_steps]
    callbacks = run.config["trainer"].get("callbacks") or []
    repeats = [each.get("init_args", {}).get("repeats_at_end", 0) for each in callbacks]
    return run.diverged or len(at_end) > max(repeats, default=0)


def rows(run: Run, shared: str, of_arm: list[str], due: list[int]) -> list[Row]:
    if not run.records:  # it diverged before the first evaluation
        arms = [run.arm + metric.removeprefix(shared) for metric in of_arm or [shared]]
        return [
            {"arm": arm, "seed": run.seed, "step": step, "repeat": 0}
            for arm in arms
            for step in due
        ]
    return [
        row
        for metric in metrics(run)
        for row in curve_records(
            [Arm(run.arm + metric.removeprefix(shared), (run.curve(metric, due),))]
        )
    ]


def losses(run: Run) -> Row:
    steps, values = run.train_losses
    stability = loss_stability(values)
    return {
        "losses_every": min(later - step for step, later in pairwise(steps)),
        "spikes": stability.spikes,
        "diverged": int(stability.diverged),
    }


def table(runs: list[Run], with_losses: bool) -> Iterator[Row]:
    shared = min((metric for run in runs for metric in metrics(run)), key=len, default="")
    ends = {run.max_steps for run in runs if run.diverged and run.max_steps}
    due = sorted(ends | {record["step"] for run in runs for record in run.records})
    for run in runs:
        members = [metrics(each) for each in runs if each.arm == run.arm]
        of_arm = list(dict.fromkeys(metric for each in members for metric in each))
        steps = [step for step in due if step <= (run.max_steps or step)]
        extra = losses(run) if with_losses else {}
        yield from (row | extra for row in rows(run, shared, of_arm, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep")
    parser.add_argument("file", type=Path)
    parser.add_argument("--losses", action="store_true")
    args = parser.parse_args()
    collected = collect_runs([args.sweep])
    runs = [run for run in collected if finished(run)]
    for run in collected:
        print("kept" if run in runs else "not finished:", run.path)
    args.file.write_text(to_csv(table(runs, args.losses)))


if __name__ == "__main__":
    main()
