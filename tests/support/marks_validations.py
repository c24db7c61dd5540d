"""Tells other processes when a run validates."""

from pathlib import Path

from lightning.pytorch import Callback


class MarksValidations(Callback):
    """Keeps a file up to date while a validation is under way.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_validation_batch_start(self, *args):
        self.path.touch()

    def on_validation_end(self, *args):
        self.path.unlink()
