"""Write the config of a fit, and compose the messages that `fit` prints for the user."""

import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger

from lit_diffusion.callbacks.slurm import job_id
from lit_diffusion.callbacks.trainer_state import isinstance_lightning
from lit_diffusion.checkpoints.averages import average_names
from lit_diffusion.checkpoints.loading import checkpoint_file
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.run_folder import Request, next_config
from lit_diffusion.cli.terminal import BOLD, paint
from lit_diffusion.files import atomic_write_text, is_checkpoint
from lit_diffusion.metrics.evaluation_record import count_training_images, is_fid, is_repeat


class RunConfig(SaveConfigCallback):
    """Writes config.yaml, or config.resume-N.yaml for a resume, into the run folder of a fit.

    The first line is a comment with the version of torch and the device. The file is written after
    the checkpoint is restored, so a resume that fails leaves no config.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the file name, which depends on the files in the folder before the run."""
        if stage == "fit":
            self._path = next_config(Path(trainer.default_root_dir))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the config, and log it as hyperparameters."""
        if trainer.is_global_zero and not self.already_saved:
            text = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
            atomic_write_text(self._path, f"# {computed_on(trainer)}\n{text}")
            settings = yaml.safe_load(text)
            settings.pop("ckpt_path", None)
            settings["trainer"].pop("logger", None)  # may contain an API key
            for logger in trainer.loggers:
                # MLflow cannot change the hyperparameters of a run
                if trainer.ckpt_path is None or not isinstance_lightning(logger, MLFlowLogger):
                    logger.log_hyperparams(settings)
        self.already_saved = True

    on_sanity_check_start = on_train_start


def computed_on(trainer: Trainer) -> str:
    """Describe the torch version, devices, float32 precision and optimizers of a run."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = f"torch {torch.__version__} on {trainer.world_size} x {name}, "
    text += f"float32 matmul precision {torch.get_float32_matmul_precision()}"
    for optimizer in trainer.optimizers:
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        text += f", {type(optimizer).__name__}" + (" with fused=True" if is_fused else "")
    return text


# Messages for the user


def summary(request: Request, trainer: Trainer, seconds: float) -> str:
    """Summarize a fit: run folder, steps and images, FIDs, and a command for sampling."""
    root = request.root
    text = f"{trainer.global_step} steps"
    if images := count_training_images(trainer):
        text += f", {images:,} images seen"
    duration = timedelta(seconds=round(seconds))
    rows = [("run folder", str(root)), ("trained", f"{text}, in {duration}")]
    if trainer.should_stop:  # by EarlyStopping
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        reasons = (getattr(each, "stopping_reason_message", None) for each in callbacks)
        rows += [("stopped", reason) for reason in reasons if reason]
    records = read_evaluations(root / "evaluations.jsonl")
    rows += fid_rows([record for record in records if not is_repeat(record)])
    file = checkpoint_file(root)
    if is_checkpoint(file) and hasattr(trainer.lightning_module, "generate"):
        command = ["lit-diffusion", "sample", "--checkpoint", str(root)]
        if not average_names(read_checkpoint(file, shapes_only=True), file):
            command += ["--weights", "raw"]
        command += [f"--trust={package}" for package in request.trust]
        rows.append(("sample", shlex.join([*command, "--num", "64", "--out", f"{root}/out"])))
    width = max(len(name) for name, _ in rows) + 2
    return "\n" + "\n".join(
        f"{paint(f'{name:<{width}}', BOLD, sys.stderr)}{text}" for name, text in rows
    )


def fid_rows(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a pair (metric, text) for each FID metric.

    The text contains the last FID, the best FID, and the FID of real images.
    """

    def number(value: float | None) -> str:
        return "NaN" if value is None else f"{value:.4g}"

    rows = []
    complete = [record for record in records if {"metric", "value", "step"} <= record.keys()]
    for metric in dict.fromkeys(r["metric"] for r in complete if is_fid(r["metric"])):
        scored = [record for record in complete if record["metric"] == metric]
        last, finite = scored[-1], [record for record in scored if record["value"] is not None]
        text = f"{number(last['value'])} at step {last['step']}"
        if finite:
            best = min(finite, key=lambda record: float(record["value"]))
            text += f", best {number(best['value'])} at step {best['step']}"
        rows.append(
            (metric, f"{text}; real images instead of samples: {number(last.get('floor'))}")
        )
    return rows


def requeue_line(request: Request) -> str:
    """Message of a fit that SLURM has restarted."""
    last = checkpoint_file(request.root)
    how = f"resumes from {last}" if is_checkpoint(last) else f"starts over: there is no {last}"
    return f"SLURM job {job_id()} was requeued, and {how}."


def resume_line(request: Request, step: int, number: signal.Signals, saved: bool) -> str:
    """Say which steps are lost after a signal has stopped a fit at `step`, and how to resume.

    `saved` says whether last.ckpt contains the last step.
    """
    last = checkpoint_file(request.root)
    text = f"Stopped by {number.name} at step {step}. "
    if not is_checkpoint(last):
        return f"{text}There is no {last} to resume from: {step} steps are lost."
    saved_step = step if saved else int(read_checkpoint(last, shapes_only=True)["global_step"])
    if (lost := step - saved_step) > 0:
        steps = "step since" if lost == 1 else f"{lost} steps since"
        text += f"The {steps} step {saved_step} {'is' if lost == 1 else 'are'} lost. "
    # If the command has a --ckpt_path, `last` might select another run folder: name the file.
    again = shlex.quote(str(last)) if request.holds_checkpoint else "last"
    return f"{text}Repeat the command with --ckpt_path={again} to resume from {last}."
