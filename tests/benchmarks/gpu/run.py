"""Steps on a GPU, ours beside those of others, as JSON lines.

    python tests/benchmarks/gpu/run.py [SECTION ...] --out DIR [--budget SECONDS] [--peers DIR]

Needs diffusers, and in DIR clones of openai/improved-diffusion (as improved),
openai/guided-diffusion (guided) and facebookresearch/DiT (dit); what is missing becomes a row with
an error. The processes of all sections start and compile at once. When all are ready, or --prepare
seconds have passed, the sections are measured in the order in which they are named. Rows are
written as they are measured, and nothing goes on after --budget seconds. --tiny runs small
networks, on a CPU as well: to try the scripts.
"""

import argparse
import os
import re
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as the other check forbids to fork

import ceilings
import ema_fid
import fit_overhead
import sampling
import sharded
import train
from diffusers import DDIMScheduler, DiTTransformer2DModel, UNet2DModel  # noqa: F401 - before forks
from measure import Rows
from turns import Worker, WorkerError, can_fork

INTERLEAVED = {
    "cifar10": train.cifar10,
    "dit": train.dit,
    "sampling": sampling.sampling,
    "imagenet128": train.imagenet128,
}
"""Sections whose workers take turns."""
TABLES = {
    "fit": fit_overhead.fits,
    "ema": ema_fid.averages,
    "fid": ema_fid.evaluations,
    "sharded": sharded.sharded,
}
"""Sections whose workers give their rows at once."""
SECTIONS = ("cifar10", "dit", "fit", "sampling", "ema", "fid", "imagenet128", "sharded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=" ".join(SECTIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=3600.0)
    parser.add_argument("--prepare", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=3, help="times that each variant is timed")
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--commit", default="unknown", help="written into every row")
    parser.add_argument("--only", default="", help="variants whose 'SECTION: NAME' it finds")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.sections = options.sections or SECTIONS
    if wrong := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"there is no section {wrong[0]}; choose from {', '.join(SECTIONS)}")
    os.environ["LIT_DIFFUSION_PEERS"] = str(options.peers.resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.out / "results.jsonl", commit=options.commit)
    start = time.time()
    workers = start_workers(options)
    try:
        measure(options, workers, rows, start)
    finally:
        for worker in [each for group in workers.values() for each in group]:
            worker.close()
    rows.write("run", "(end)", seconds=round(time.time() - start, 1))


def start_workers(options: argparse.Namespace) -> dict[str, list[Worker]]:
    """Start the processes of each section."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and end the processes
    method = "fork" if can_fork() else "spawn"
    workers = {"ceilings": [Worker("ceilings", ceilings.ceilings, options.tiny, method)]}
    for section in options.sections:
        make_bodies = (INTERLEAVED | TABLES)[section]
        names = {f"{section}: {name}": name for name in make_bodies(options.tiny)}
        workers[section] = [
            Worker(name, make_bodies, options.tiny, method)
            for full_name, name in names.items()
            if re.search(options.only, full_name)
        ]
    return workers


def measure(
    options: argparse.Namespace, workers: dict[str, list[Worker]], rows: Rows, start: float
) -> None:
    """Measure section by section, and end the processes of each."""
    deadline, ready_by = start + options.budget, start + min(options.prepare, options.budget)
    ready = {name: wait_for(name, workers[name], rows, ready_by) for name in options.sections}
    matmul_tflops = write_ceilings(workers["ceilings"], rows, deadline)
    for section in options.sections:
        if section in TABLES:
            write_tables(section, ready[section], rows, deadline)
        else:
            seconds, rounds = 0.1 if options.tiny else 1.0, options.rounds
            each = ready[section], rows, deadline, matmul_tflops, seconds, rounds
            train.interleave(section, *each)
        for worker in workers.pop(section):
            worker.close()


def write_ceilings(workers: list[Worker], rows: Rows, deadline: float) -> float | None:
    """Measure what the device does at most; returns TFLOP/s of a matrix product in bf16."""
    (worker,) = workers
    try:
        worker.wait(deadline - time.time())
        measured = worker.call(deadline - time.time(), "measure")
    except WorkerError as error:
        rows.write("ceilings", "(section)", error=str(error)[-1500:])
        return None
    finally:
        worker.close()
        workers.clear()
    rows.common |= measured.pop("versions")
    for variant, values in measured.items():
        rows.write("ceilings", variant, **values)
    return measured["matmul, bf16"]["tflops"]


def wait_for(section: str, workers: list[Worker], rows: Rows, ready_by: float) -> list[Worker]:
    """The workers that are ready by then; a row says so for each of the others."""
    ready = []
    for worker in workers:
        try:
            worker.wait(ready_by - time.time())
            ready.append(worker)
        except WorkerError as error:
            rows.write(section, worker.name, error=str(error)[-1500:])
    return ready


def write_tables(section: str, workers: list[Worker], rows: Rows, deadline: float) -> None:
    for worker in workers:
        try:
            answer = worker.call(min(deadline - time.time(), 120), "measure")
        except WorkerError as error:
            rows.write(section, worker.name, error=str(error)[-1500:])
            continue
        tables = answer if all(isinstance(v, dict) for v in answer.values()) else None
        for variant, values in (tables or {worker.name: answer}).items():
            rows.write(section, variant, **values)


if __name__ == "__main__":
    main()
