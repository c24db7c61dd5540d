import numpy as np
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_diffusion.callbacks.parts.pictures import log_picture


def test_tensorboard_gets_pictures_and_loggers_without_them_get_none(tmp_path):
    board = TensorBoardLogger(tmp_path, name="", version="")
    picture = Image.fromarray(np.full((4, 6, 3), 200, dtype=np.uint8))
    log_picture([CSVLogger(tmp_path / "csv"), board], "samples/step-ema", picture, step=7)
    board.experiment.flush()
    events = EventAccumulator(str(tmp_path)).Reload()
    (seen,) = events.Images("samples/step-ema")
    assert (seen.step, seen.width, seen.height) == (7, 6, 4)
