"""Networks at equal time of training.

    backbones.py steps CONFIG NAME=ARM ... [--steps 1500]    how many steps each network may take
    backbones.py measure RUNS ... --judge DATA --out FILE.csv    of the runs RUNS/NAME/seed-N
    backbones.py table FILE.csv    as Markdown, each beside the U-Net that predicts the same

`steps` trains all networks by turns, a step each, on noise, and gives each as much time as the
first would take for --steps. DATA is digits, where a support-vector machine recognises the labels
of 1,000 samples, or a file of `train-extractor`, whose network does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from csv_tables import Row, group_rows, print_table, read_rows, write_rows
from digits_quality import digit_judge, pixels
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_diffusion.checkpoints.loading import instantiate, load_module
from lit_diffusion.lab.compare.run_folders import collect_runs
from lit_diffusion.metrics.small_classifier import load_small_classifier

COLUMNS = ("parameters", "steps", "fid", "pixels", "recognised", "images_per_second")
HEADS = ["network", "predicts", "lr", "parameters", "steps", "FID", "beside the U-Net's", "pixels"]
HEADS += ["recognised", "images/s"]
Judge = Callable[[Tensor], Tensor]
BATCH, SAMPLES, TRUST = 64, 1000, ("diffusers_networks",)


def model_of(file: str) -> dict[str, Any]:
    model: dict[str, Any] = yaml.safe_load(Path(file).read_text())["model"]["init_args"]
    return model


def step_of(network: nn.Module, shape: tuple[int, ...], classes: int) -> Callable[[], float]:
    """One step of training; the seconds it takes."""
    network = network.train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters())
    x, label = torch.randn(BATCH, *shape), 1000 * torch.rand(BATCH)
    labels = torch.randint(classes, (BATCH,))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        (network(x, label, labels) - x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def print_steps(config: str, arms: list[str], budget: int, rounds: int = 40) -> None:
    usual = model_of(config)
    files = {"baseline": config, **dict(arm.split("=") for arm in arms)}
    networks = {
        name: instantiate([model_of(file)["network"]], nn.Module, TRUST, file)
        for name, file in files.items()
    }
    shape, classes = tuple(usual["image_shape"]), usual["num_classes"]
    steps = {name: step_of(network, shape, classes) for name, network in networks.items()}
    times = [{name: step() for name, step in steps.items()} for _ in range(rounds)][5:]
    for name, network in networks.items():
        ratio = statistics.median(each[name] / each["baseline"] for each in times)
        size = sum(parameter.numel() for parameter in network.parameters())
        print(f"{name} {round(budget / ratio)}  # {size:,} parameters, a step costs {ratio:.2f}")


def judge_of(data: str) -> Judge:
    if data == "digits":
        svm = digit_judge()
        return lambda images: torch.from_numpy(svm.predict(pixels(images)))
    network = load_small_classifier(load_file(data), 28)
    return lambda images: network.head(network(images)).argmax(1)


@torch.no_grad()
def measured(run: Any, judge: Judge) -> dict[str, Any]:
    loaded = load_module(run.path, trust=TRUST)
    module, hyper_parameters = loaded.module, loaded.checkpoint["hyper_parameters"]
    labels, start = torch.arange(SAMPLES) % 10, time.perf_counter()
    parts = zip(range(0, SAMPLES, 250), labels.split(250), strict=True)
    images = torch.cat([module.generate(range(i, i + 250), part) for i, part in parts])
    seconds = time.perf_counter() - start
    last = [record for record in run.records if record["step"] == run.max_steps]
    return {
        "arm": run.arm,
        "seed": run.seed,
        "predicts": type(module.parameterization).__name__,
        "lr": hyper_parameters["optimizer"]["init_args"]["lr"],
        "steps": run.max_steps,
        "parameters": sum(parameter.numel() for parameter in module.network.parameters()),
        "fid": statistics.geometric_mean(record["value"] for record in last),
        "pixels": last[0]["second_look"]["pixels"],
        "recognised": (judge(images) == labels).double().mean().item(),
        "images_per_second": SAMPLES / seconds,
    }


def cells_of(name: str, runs: list[Row], usual: float) -> list[str]:
    mean = {key: statistics.fmean(float(run[key]) for run in runs) for key in COLUMNS}
    fids = [float(run["fid"]) for run in runs]
    spread = f" +- {statistics.stdev(fids):.3g}" if len(fids) > 1 else ""
    return [
        name,
        *(runs[0][key] for key in ("predicts", "lr")),
        *(f"{mean[key]:,.0f}" for key in ("parameters", "steps")),
        f"{mean['fid']:.3g}{spread}",
        f"{mean['fid'] / usual:.2f}",
        f"{mean['pixels']:.3g}",
        f"{mean['recognised']:.1%}",
        f"{mean['images_per_second']:.0f}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("steps")
    steps.add_argument("config")
    steps.add_argument("arms", nargs="*")
    steps.add_argument("--steps", type=int, default=1500)
    measure = commands.add_parser("measure")
    measure.add_argument("runs", nargs="+")
    measure.add_argument("--judge", required=True)
    measure.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "steps":
        print_steps(args.config, args.arms, args.steps)
    elif args.command == "table":
        kinds = group_rows(read_rows(args.file), "predicts", "arm")
        fids = {
            kind: statistics.fmean(float(r["fid"]) for r in runs) for kind, runs in kinds.items()
        }
        usual = {kind: fids[kind[0], "baseline"] for kind in kinds}
        print_table(HEADS, [cells_of(kind[1], runs, usual[kind]) for kind, runs in kinds.items()])
    else:
        judge = judge_of(args.judge)
        write_rows(args.out, (measured(run, judge) for run in collect_runs(args.runs)))
