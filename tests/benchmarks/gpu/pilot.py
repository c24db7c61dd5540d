"""Run as many runs of the CIFAR-10 pilot as fit into the minutes of a GPU.

    python tests/benchmarks/gpu/pilot.py --minutes 13 --csv docs/results

The pilot trains configs/cifar10-small.yaml with four arms, three seeds and two learning rates. The
script starts the runs that the CSV files lack, one after the other and in a fixed order, as long as
the duration of the longest run fits into the time that is left. When a run has finished, its FIDs
are appended to cifar10-pilot-LR.csv in the folder --csv, so the next call continues with the next
run, on any machine. Checkpoints of unfinished runs are not kept. Each row names the device and the
extractor of its FIDs; files made with one extractor are not continued with another. A run that
fails, for example because it diverges, is added to cifar10-pilot-failed.txt, and not tried again.

The images must be in data/cifar10/train and data/cifar10/test. FID uses the features of
cifar10-jpeg-cnn.safetensors, which `lit-diffusion train-extractor` trained on images that were
recompressed as JPEG of quality 75. Further arguments are options of every fit.
"""

import argparse
import csv
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.lab.compare.curves import OTHER_METRICS
from lit_diffusion.lab.compare.sweep import PlannedRun, plan_sweep

CONFIGS = Path(__file__).parents[3] / "configs"
EXTRACTOR = Path(__file__).with_name("cifar10-jpeg-cnn.safetensors")
ARMS = ["lr-decay", "mdlrc", "cifar10-small/clts"]
SEEDS = [0, 1, 2]
LRS = ["1e-4", "5e-4"]
COLUMNS = ["arm", "seed", "step", "repeat", "fid", *OTHER_METRICS, "seconds", "device", "extractor"]


def runs(out: Path, options: list[str]) -> Iterator[tuple[str, PlannedRun]]:
    """(lr, run) in the order of their importance: both lrs of a seed before the next seed."""
    experiment = [str(CONFIGS / "cifar10-small.yaml")]
    if torch.cuda.is_available():
        experiment.append(str(CONFIGS / "fragments" / "gpu.yaml"))
    arms = [str(CONFIGS / "arms" / f"{arm}.yaml") for arm in ARMS]
    for seed in SEEDS:
        for lr in LRS:
            fid = f"--trainer.callbacks.FIDEvaluation.extractor={EXTRACTOR}"
            given = [f"--model.optimizer.lr={lr}", fid, *options]
            for run in plan_sweep(experiment, arms, [seed], out / lr, given):
                yield lr, run


def evaluations(run: PlannedRun) -> Iterator[dict[str, object]]:
    """One row per FID of a finished run; repeats have other sampling seeds."""
    for record in read_evaluations(run.folder / "evaluations.jsonl"):
        repeat = record["seeds"][0] // record["num_fake"]
        others = {name: record["second_look"].get(name) for name in OTHER_METRICS}
        yield {"step": record["step"], "repeat": repeat, "fid": record["value"]} | others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10-pilot"))
    args, options = parser.parse_known_args()
    end = time.monotonic() + 60 * args.minutes
    extractor = hashlib.sha256(EXTRACTOR.read_bytes()).hexdigest()[:16]
    files = {lr: args.csv / f"cifar10-pilot-{lr}.csv" for lr in LRS}
    tables = {lr: csv.DictReader(f.open()) if f.exists() else [] for lr, f in files.items()}
    rows = [row | {"lr": lr} for lr, table in tables.items() for row in table]
    if others := {row["extractor"] for row in rows} - {extractor}:
        sys.exit(f"{args.csv} has FIDs of another extractor ({others.pop()}, not {extractor}).")
    finished = {(row["lr"], row["arm"], row["seed"]) for row in rows}
    failures = args.csv / "cifar10-pilot-failed.txt"
    failed = failures.read_text().splitlines() if failures.exists() else []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    longest = max((float(row["seconds"]) for row in rows if row["device"] == device), default=0.0)
    for lr, run in runs(args.out, options):
        name = f"{run.name} at lr {lr}"
        if (lr, run.arm, str(run.seed)) in finished or name in failed:
            continue
        if time.monotonic() + longest > end:
            sys.exit(f"{name} is left for the next call: no time is left.")
        shutil.rmtree(run.folder, ignore_errors=True)  # of a call that was killed
        start = time.monotonic()
        if code := subprocess.run(run.command).returncode:
            if code == 1:  # not a wrong config or a signal
                with failures.open("a") as file:
                    file.write(f"{name}\n")
            print(f"{name} failed with exit code {code}; {failures} lists runs not to try again.")
            continue
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        fixed = {"arm": run.arm, "seed": run.seed, "seconds": round(seconds, 1)}
        fixed |= {"device": device, "extractor": extractor}
        with files[lr].open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(fixed | row for row in evaluations(run))
        shutil.rmtree(run.folder / "checkpoints")
    print("all runs are finished or have failed")


if __name__ == "__main__":
    main()
