"""Run folders as training leaves them, with FIDs that are made up: for what compares runs."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from lit_diffusion.cli.loggers import AppendingCSVLogger
from lit_diffusion.lab.compare.curves import Arm, Curve
from lit_diffusion.metrics.evaluation_record import FIDRecord
from support.tiny_run import tiny_config

STEPS = tuple(range(100, 2001, 100))


def fid_at(step: float, speed: float, level: float = 0.0) -> float:
    """A power law towards a floor: an arm of speed 2 is at step k where others are at 2 k."""
    return math.exp(level) * (0.3 + 20 * (step * speed / 100) ** -0.8)


def fids(
    speed: float, seed: object, spread: float = 0.06, steps: Sequence[int] = STEPS
) -> list[float]:
    """FIDs of one run, each with 2% of noise.

    Args:
        speed: of its arm.
        seed: of training.
        spread: standard deviation of the log speed over training seeds.
        steps: evaluated.
    """
    rng = random.Random(f"{speed} {seed}")
    speed_of_run = speed * math.exp(rng.gauss(0, spread))
    return [fid_at(step, speed_of_run) * math.exp(rng.gauss(0, 0.02)) for step in steps]


def arm(name: str, speed: float, seeds: Iterable[object] = range(5), spread: float = 0.06) -> Arm:
    """An arm that is `speed` times as fast as one of speed 1."""
    return Arm(
        name,
        tuple(Curve(str(s), STEPS, tuple(fids(speed, f"{name}{s}", spread))) for s in seeds),
    )


def record(step: int, value: float | None, **changes: Any) -> dict[str, Any]:
    """A line of evaluations.jsonl."""
    fid_record = FIDRecord(
        metric="val/fid_360",
        value=value,
        step=step,
        images=64 * step,
        num_fake=360,
        num_real=360,
        reference="val",
        data="1e29d36031575f1d",
        protocol="digits-cnn",
        extractor_sha256="75d5" * 16,
        resize="none",
        weights="ema",
        seeds=(0, 360),
        labels="seed % 10",
        sampling={"solver": "DPMSolverPP(steps=20)", "steps": 20},
        floor=0.4,
        floor_images="360 train images against val",
        non_finite=0 if value else 3,
        non_finite_seeds=[] if value else [7, 8, 9],
        seconds={"total": 1.5},
    )
    return asdict(fid_record) | changes


def write_run(
    folder: Path,
    values: Sequence[float | None],
    seed: int = 0,
    steps: Sequence[int] = STEPS,
    repeats: Sequence[float] = (),
    lr: float = 1e-3,
    max_steps: int | None = None,
    **protocol: Any,
) -> Path:
    """A run folder: config.yaml, metrics.csv and evaluations.jsonl."""
    folder.mkdir(parents=True)
    config = tiny_config(max_steps=max_steps or steps[-1], default_root_dir=str(folder))
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = lr
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed} | config))
    records = [record(step, fid, **protocol) for step, fid in zip(steps, values, strict=False)]
    records += [
        record(steps[-1], fid, **protocol, seeds=(360 * k, 360 * k + 360))
        for k, fid in enumerate(repeats, start=1)
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    logger = AppendingCSVLogger(folder)
    for row in records[: len(steps)]:
        numbers = {"val/loss": 0.1, "val/fid_360": row["value"] or math.nan}
        logger.log_metrics(numbers, step=row["step"] - 1)
    return folder


def write_arm(folder: Path, speed: float, seeds: Iterable[int] = range(5), **options: Any) -> None:
    """Runs folder/seed-<n> of one arm."""
    for seed in seeds:
        values = fids(speed, seed)
        again = tuple(values[-1] * math.exp(random.Random(k).gauss(0, 0.02)) for k in (1, 2))
        run = write_run(folder / f"seed-{seed}", values, seed, repeats=again, **options)
        for step in (500, 1000, 2000):
            write_grid(run, step, shade=round(255 * min(1.0, 0.3 / values[step // 100 - 1] + 0.2)))


def write_grid(run: Path, step: int, shade: int) -> None:
    """A picture of samples, whose brightness is chosen."""
    (run / "samples").mkdir(exist_ok=True)
    Image.new("L", (80, 80), shade).save(run / "samples" / f"step-{step:08d}-ema.png")
