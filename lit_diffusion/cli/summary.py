"""What a person reads at the end of a fit: where things are, how good they are, what to do next."""

import shlex
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_diffusion.callbacks.slurm import job_id
from lit_diffusion.checkpoints.averages import find_averages
from lit_diffusion.checkpoints.loading import checkpoint_file
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.run_folder import Request
from lit_diffusion.metrics.evaluation_record import count_training_images, is_repeat


def summary(request: Request, trainer: Trainer, seconds: float) -> str:
    """A few lines on a fit that has ended, `seconds` after the command began."""
    root = request.root
    done = f"{trainer.global_step} steps"
    if images := count_training_images(trainer):
        done += f", {images:,} images seen"
    duration = timedelta(seconds=round(seconds))
    rows = [("run folder", str(root)), ("trained", f"{done}, in {duration}")]
    reasons = (getattr(c, "stopping_reason_message", None) for c in trainer.callbacks)  # type: ignore[attr-defined]
    rows += [("stopped", reason) for reason in reasons if reason and trainer.should_stop]
    records = read_evaluations(root / "evaluations.jsonl")
    rows += fid_rows([record for record in records if not is_repeat(record)])
    if checkpoint_file(root).is_file():
        rows.append(("sample", _sample_command(root, request.trust)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n" + "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def _sample_command(root: Path, trust: Sequence[str]) -> str:
    file = checkpoint_file(root)
    averaged = find_averages(read_checkpoint(file, mmap=True), file)
    options = [] if averaged else ["--weights", "raw"]
    options += [f"--trust={package}" for package in trust]
    options += ["--num", "64", "--out", f"{root}/out"]
    return shlex.join(["lit-diffusion", "sample", "--checkpoint", str(root), *options])


def requeue_line(request: Request) -> str:
    """A line on a fit that a batch system has started again."""
    last = checkpoint_file(request.root)
    found = f"goes on from {last}" if last.is_file() else f"begins anew, as there is no {last}"
    return f"SLURM job {job_id()} was requeued, and {found}."


def resume_line(request: Request, step: int, number: signal.Signals, saved: bool) -> str:
    """A line on a fit that a signal stopped after so many optimizer steps, `saved` or not."""
    last = checkpoint_file(request.root)
    text = f"Stopped by {number.name} at step {step}. "
    if not last.is_file():
        return f"{text}There is no {last} to go on from: {step} steps are lost."
    kept = step if saved else int(read_checkpoint(last, mmap=True)["global_step"])
    num, verb = ("step", "is") if step - kept == 1 else (f"{step - kept} steps", "are")
    text += f"The {num} since step {kept} {verb} lost. " if kept < step else ""
    # The folder of a checkpoint that the command names is not where it would look for `last`.
    again = shlex.quote(str(last)) if request.holds_checkpoint else "last"
    return f"{text}The same command with --ckpt_path={again} goes on from {last}."


def fid_rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """One row per FID that was scored: the last, the best and the floor."""
    rows = []
    for metric in dict.fromkeys(r["metric"] for r in records if "fid" in str(r.get("metric"))):
        scored = [r for r in records if r["metric"] == metric]
        last, finite = scored[-1], [r for r in scored if r["value"] is not None]
        text = f"{_number(last['value'])} at step {last['step']}"
        if finite:
            best = min(finite, key=lambda r: float(r["value"]))
            text += f", best {_number(best['value'])} at step {best['step']}"
        rows.append((metric, f"{text}; real images in their place: {_number(last.get('floor'))}"))
    return rows


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4g}"
