import lightning.pytorch as pl
import pytest
import torch
from support.plain_module import assert_same_bits
from support.tiny_run import TinyData, TinyModule, TinyNet
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.commands.catching_up import CatchUp
from lit_diffusion.commands.keeping import LastCheckpoint


class Plateau(TinyModule):
    """Halves its lr every `frequency` epochs or steps, whatever the loss."""

    def __init__(self, interval, frequency=1):
        torch.manual_seed(0)
        super().__init__(TinyNet(3), torch.optim.Adam)
        self.when = {"interval": interval, "frequency": frequency, "monitor": "train/loss"}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        never = {"threshold": 1e3, "threshold_mode": "abs"}
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **never)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.when}}


def fit(folder, module, max_steps, ckpt_path=None):
    trainer = pl.Trainer(
        callbacks=[CatchUp(), LastCheckpoint(folder)],
        accelerator="cpu",
        logger=False,
        max_steps=max_steps,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, TinyData(), ckpt_path=ckpt_path)  # 4 batches an epoch
    return trainer


@pytest.mark.parametrize("when", [("epoch",), ("epoch", 2), ("step",), ("step", 3)])
@pytest.mark.parametrize("end", [3, 4, 5, 8])
def test_a_run_that_is_prolonged_has_the_lr_of_one_that_was_as_long(tmp_path, when, end):
    """Where it ended with an epoch, Lightning has left the update of that out too."""
    whole = fit(tmp_path / "whole", Plateau(*when), 20)
    fit(tmp_path, Plateau(*when), end)
    again = fit(tmp_path, Plateau(*when), 20, tmp_path / "last.ckpt")
    assert whole.optimizers[0].param_groups[0]["lr"] < 0.1
    assert_same_bits(again.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    assert_same_bits(again.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("metrics", [[1], {"a": 1.0}, {"a": torch.ones(2)}, {1: torch.ones(1)}])
def test_metrics_that_are_none_are_refused(metrics):
    with pytest.raises(ValueError, match="metrics_of_schedules must be numbers by name"):
        CatchUp().on_load_checkpoint(None, None, {"metrics_of_schedules": metrics})
