import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from support.plain_module import PlainModule, loader, make_trainer
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import EMA, NoiseLevelLoss, SampleGrid, StepSeed
from lit_diffusion.seeding import seed_step


def losses(folder, *callbacks):
    module = PlainModule()
    make_trainer(folder, *callbacks).fit(module, loader())
    return module.losses


def test_the_numbers_are_those_of_a_module_of_ours(tmp_path):
    class Draws(PlainModule):
        def training_step(self, batch, batch_idx):
            number = torch.rand(())
            seed_step(5, self.global_rank, self.global_step, batch_idx)
            assert torch.equal(number, torch.rand(()))
            return super().training_step(batch, batch_idx)

    make_trainer(tmp_path, StepSeed(5)).fit(Draws(), loader())


def test_epochs_and_accumulated_batches_draw_different_numbers(tmp_path):
    drawn = []

    class Draws(PlainModule):
        def training_step(self, batch, batch_idx):
            drawn.append(torch.rand(1).item())
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(tmp_path, StepSeed(0), max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(Draws(), loader())
    assert len(set(drawn)) == len(drawn) == 12


def test_numbers_of_every_library_are_those_of_the_step_and_of_no_other_library(tmp_path):
    drawn = []

    class Draws(PlainModule):
        def training_step(self, batch, batch_idx):
            numpys = np.random.rand()  # noqa: NPY002
            drawn.append((torch.rand((), dtype=torch.float64).item(), numpys, random.random()))
            return super().training_step(batch, batch_idx)

    for before in (0, 1):
        torch.manual_seed(before), random.seed(before), np.random.seed(before)  # noqa: NPY002
        make_trainer(tmp_path, StepSeed(0)).fit(Draws(), loader())
    assert drawn[:4] == drawn[4:]
    assert len({round(number, 4) for numbers in drawn for number in numbers}) == 12


def test_the_seed_of_seed_everything_is_taken_or_missed_at_fit_start(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with pytest.raises(ValueError, match="seed_everything"):
        losses(tmp_path, StepSeed())
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that the next line is undone
    seed_everything(5, verbose=False)
    assert losses(tmp_path, StepSeed()) == losses(tmp_path, StepSeed(5))
    assert losses(tmp_path, StepSeed()) != losses(tmp_path, StepSeed(4))


def train_on_two_ranks(folder):
    """What a rank drew and measured; the checkpoint is end.ckpt."""
    module = tiny_diffusion()
    step, drawn = module.training_step, []

    def training_step(batch, batch_idx):
        drawn.append(torch.rand(1).item())
        return step(batch, batch_idx)

    module.training_step = training_step
    module.on_train_batch_start = lambda batch, batch_idx: None  # leave seeding to StepSeed
    ema, levels = EMA((0.9,)), NoiseLevelLoss(num_levels=3, num_images=10)
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 1}
    trainer = make_trainer(folder, StepSeed(0), ema, levels, SampleGrid(3), **options)
    trainer.fit(module, images(32, 4), images(12, 4))
    trainer.save_checkpoint(folder / "end.ckpt")
    return {
        "drawn": drawn,
        "average": [v.tolist() for v in ema.state_dict()["shadows"][0].values()],
        "levels": {k: v.item() for k, v in trainer.callback_metrics.items() if "loss_u" in k},
        "memorized": trainer.callback_metrics["val/memorized"].item(),
    }


@pytest.mark.system
def test_two_ranks_draw_different_numbers_share_averages_and_losses_and_one_writes_the_grid(
    tmp_path,
):
    zero, one = spawn(train_on_two_ranks, 2, folder := tmp_path / "1")
    assert len({*zero["drawn"], *one["drawn"]}) == 8
    assert zero["average"] == one["average"]
    assert zero["memorized"] == one["memorized"]  # which any rank's ModelCheckpoint may monitor
    files = sorted(path.name for path in (folder / "samples").iterdir())
    assert files == ["nearest-00000004-ema.png", "step-00000004-ema.png"]
    alone = make_trainer(tmp_path, EMA((0.9,)), NoiseLevelLoss(num_levels=3, num_images=10))
    alone.validate(tiny_diffusion(), images(12, 5), ckpt_path=folder / "end.ckpt", verbose=False)
    levels = {k: v.item() for k, v in alone.callback_metrics.items() if "loss_u" in k}
    assert zero["levels"] == one["levels"] == levels
    assert len(levels) == 3
