"""What a fit keeps beside its checkpoints: its config, its curves, its count of images."""

from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_info

from lit_diffusion.callbacks.trainer_state import isinstance_lightning, logger_step, should_log
from lit_diffusion.cli.lightning_internals import (
    count_validated_step,
    is_row_pending,
    metrics_to_log,
)
from lit_diffusion.cli.loggers import AppendingCSVLogger, rewind_evaluations
from lit_diffusion.cli.run_folder import next_config
from lit_diffusion.files import atomic_write_text
from lit_diffusion.metrics.evaluation_record import ImageCount, parse_image_count, start_image_count


class RunConfig(SaveConfigCallback):
    """Writes config.yaml, and at a resume config.resume-N.yaml, into the run folder of a fit.

    It is written when all of a checkpoint is restored: a config with which that failed must not be
    taken for the run's.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the name, which depends on what the folder holds before anything is written."""
        if stage == "fit":
            self._path = next_config(Path(trainer.default_root_dir))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the config, and give it to the loggers."""
        if trainer.is_global_zero and not self.already_saved:
            text = self.parser.dump(self.config, skip_unset=False)
            atomic_write_text(self._path, text)
            settings = yaml.safe_load(text)
            settings.pop("ckpt_path", None)
            settings["trainer"].pop("logger", None)  # which may hold the key of an account
            for logger in trainer.loggers:
                is_mlflow = isinstance_lightning(logger, MLFlowLogger)  # keeps the first values
                if trainer.ckpt_path is None or not is_mlflow:
                    logger.log_hyperparams(settings)
        self.already_saved = True

    on_sanity_check_start = on_train_start


class CurvesInStep(Callback):
    """Keeps metrics.csv and evaluations.jsonl in step with the checkpoint that a run goes on from.

    A checkpoint is written when all rows of its step are on the disk, and a resume takes out what
    was logged after it.
    """

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """Log the row that Lightning logs only after `on_train_batch_end`, where saves are made."""
        if not is_row_pending(trainer) or not should_log(trainer):
            return
        if metrics := convert_tensors_to_scalars(metrics_to_log(trainer)):
            step = metrics.pop("step", logger_step(trainer))
            metrics.setdefault("epoch", trainer.current_epoch)
            for logger in _csv_loggers(trainer):
                logger.log_ahead(metrics, int(step))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewind to the step that was restored."""
        count_validated_step(trainer)
        if not trainer.is_global_zero:
            return
        evaluations = Path(trainer.default_root_dir) / "evaluations.jsonl"
        step = trainer.global_step
        dropped = {evaluations: rewind_evaluations(evaluations, step)}
        for logger in _csv_loggers(trainer):
            dropped[logger.path] = logger.rewind(logger_step(trainer))
        for file, count in dropped.items():
            if count:
                rank_zero_info(f"Took {count} rows of steps after {step} out of {file}.")


class ImagesSeen(Callback):
    """Counts training images, also of a run whose resumes change the batch size."""

    _KEY = "images_seen"

    def __init__(self) -> None:
        self.image_count: ImageCount | None = None  # of the fit, which `images_seen` asks for

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count on from what a checkpoint brought."""
        self.image_count = start_image_count(trainer, self.image_count)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the count, where commands that do not count need not know of it."""
        if self.image_count is not None:
            checkpoint[self._KEY] = list(self.image_count)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from a saved count."""
        self.image_count = parse_image_count(checkpoint.get(self._KEY))


def _csv_loggers(trainer: Trainer) -> list[AppendingCSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, AppendingCSVLogger)]
