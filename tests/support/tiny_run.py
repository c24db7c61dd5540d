"""A module, data and config that train in a moment, for tests of what surrounds training."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TinyNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TinyModule(pl.LightningModule):
    """Regression; its name is none that the package knows."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        shift: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.shift = shift
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.network(x).squeeze(1) - y - self.shift).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self._lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class TwoOptimizers(TinyModule):
    """Steps two optimizers in each batch, as a GAN does."""

    def __init__(self, network: nn.Module, optimizer: OptimizerCallable) -> None:
        super().__init__(network, optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self._optimizer(layer.parameters()) for layer in self.network.layers]


class TinyData(pl.LightningDataModule):
    """Batches in the same order in each epoch, continued where a run was interrupted."""

    def __init__(self, batch_size: int = 4, num: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        x = torch.randn(num, 2, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, x.sum(1))

    def train_dataloader(self) -> "ResumableLoader":
        return ResumableLoader(self)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class PreparedData(TinyData):
    """Cannot be opened before `prepare_data` was called."""

    def prepare_data(self) -> None:
        self.is_prepared = True

    def setup(self, stage: str) -> None:
        if not hasattr(self, "is_prepared"):
            raise FileNotFoundError("there are no files")


class ResumableLoader(DataLoader):
    def __init__(self, data: TinyData) -> None:
        super().__init__(data.data, data.batch_size)
        object.__setattr__(self, "owner", data)

    def __iter__(self) -> Iterator[Any]:
        done = self.owner.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        batches = list(super().__iter__())
        yield from batches[done:]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None: ...


HERE = "support.tiny_run"


def spec(class_path: str, **init_args: Any) -> dict[str, Any]:
    """An object in a config."""
    return {"class_path": class_path} | ({"init_args": init_args} if init_args else {})


def tiny_config(**trainer: Any) -> dict[str, Any]:
    """A complete config; `trainer` adds to its Trainer."""
    return {
        "trainer": {
            "accelerator": "cpu",
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "max_steps": 8,
            **trainer,
        },
        "model": spec(
            f"{HERE}.TinyModule",
            network=spec(f"{HERE}.TinyNet", width=3),
            optimizer=spec("torch.optim.Adam", lr=0.1, betas=[0.8, 0.9]),
        ),
        "data": spec(f"{HERE}.TinyData"),
    }


EMA = spec("lit_diffusion.callbacks.ema.EMA", decays=[0.5])


def write_config(config: dict[str, Any], path: Path = Path("tiny.yaml")) -> Path:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


class Writes(BasePredictionWriter):
    """Without which there is no predicting."""

    def __init__(self) -> None:
        super().__init__("epoch")

    def write_on_epoch_end(self, *args: Any) -> None: ...


class SignalsItself(Writes):
    """Sends this process a signal in the second batch, whatever it is that runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.number = signal.Signals[name]

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if batch_idx == 1:
            os.kill(os.getpid(), self.number)

    on_validation_batch_start = on_train_batch_start
    on_test_batch_start = on_predict_batch_start = on_train_batch_start


class Nothing(pl.Callback):
    """A callback of the user's own."""
