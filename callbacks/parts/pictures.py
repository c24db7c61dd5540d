"""Pictures for whatever loggers a Trainer has."""

from collections.abc import Iterable

import numpy as np
from lightning.pytorch.loggers import (
    CometLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from PIL.Image import Image

from lit_diffusion.system.trainer_state import is_a


def log_picture(loggers: Iterable[Logger], name: str, picture: Image, step: int) -> None:
    """Give a picture to TensorBoard, W&B, MLflow and Comet; other loggers get none."""
    for logger in loggers:
        if is_a(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
        elif is_a(logger, WandbLogger):
            logger.log_image(name, [picture], step)
        elif is_a(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
        elif is_a(logger, CometLogger):
            logger.experiment.log_image(picture, name, step=step)
