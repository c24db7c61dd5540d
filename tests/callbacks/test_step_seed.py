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


def draws(folder, draw=lambda: torch.rand(()).item(), seed=0, **options):
    """What each training step draws."""

    class Draws(PlainModule):
        def training_step(self, batch, batch_idx):
            drawn.append(draw())
            steps.append((self.global_rank, self.global_step, batch_idx))
            return super().training_step(batch, batch_idx)

    drawn, steps = [], []
    make_trainer(folder, StepSeed(seed), **options).fit(Draws(), loader())
    return drawn, steps


def test_the_numbers_are_those_of_a_module_of_ours(tmp_path):
    for number, step in zip(*draws(tmp_path, seed=5), strict=True):
        seed_step(5, *step)
        assert number == torch.rand(()).item()


def test_epochs_and_accumulated_batches_draw_different_numbers(tmp_path):
    drawn, _ = draws(tmp_path, max_epochs=3, accumulate_grad_batches=2)
    assert len(set(drawn)) == len(drawn) == 12


def test_numbers_of_every_library_are_those_of_the_step_and_of_no_other_library(tmp_path):
    def draw():
        numpys = np.random.rand()  # noqa: NPY002
        return torch.rand((), dtype=torch.float64).item(), numpys, random.random()

    runs = []
    for before in (0, 1):
        torch.manual_seed(before), random.seed(before), np.random.seed(before)  # noqa: NPY002
        runs.append(draws(tmp_path, draw))
    assert runs[0] == runs[1]
    assert len({round(number, 4) for numbers in runs[0][0] for number in numbers}) == 12


def test_the_seed_of_seed_everything_is_taken_or_missed_at_fit_start(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with pytest.raises(ValueError, match="seed_everything"):
        draws(tmp_path, seed=None)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that the next line is undone
    seed_everything(5, verbose=False)
    assert draws(tmp_path, seed=None) == draws(tmp_path, seed=5) != draws(tmp_path, seed=4)


def train_on_two_ranks(folder):
    """What a rank drew and measured; the checkpoint is end.ckpt."""
    module, drawn = tiny_diffusion(), []
    module.on_before_backward = lambda loss: drawn.append(torch.rand(1).item())
    module.on_train_batch_start = lambda batch, batch_idx: None  # leave seeding to StepSeed
    callbacks = EMA((0.9,)), NoiseLevelLoss(num_levels=3, num_images=10), SampleGrid(3)
    trainer = make_trainer(folder, StepSeed(0), *callbacks, devices=2, strategy="ddp")
    trainer.fit(module, images(32, 4), images(12, 4))
    trainer.save_checkpoint(folder / "end.ckpt")
    average = callbacks[0].state_dict()["shadows"][0].values()
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return drawn, [value.tolist() for value in average], metrics


@pytest.mark.system
def test_two_ranks_draw_different_numbers_share_averages_and_losses_and_one_writes_the_grid(
    tmp_path,
):
    zero, one = spawn(train_on_two_ranks, 2, folder := tmp_path / "1")
    assert len({*zero[0], *one[0]}) == 8
    assert zero[1] == one[1]
    levels = {name: value for name, value in zero[2].items() if "loss_u" in name}
    for name in (*levels, "val/memorized"):  # which any rank's ModelCheckpoint may monitor
        assert zero[2][name] == one[2][name]
    files = sorted(path.name for path in (folder / "samples").iterdir())
    assert files == ["nearest-00000004-ema.png", "step-00000004-ema.png"]
    alone = make_trainer(tmp_path, EMA((0.9,)), NoiseLevelLoss(num_levels=3, num_images=10))
    alone.validate(tiny_diffusion(), images(12, 5), ckpt_path=folder / "end.ckpt", verbose=False)
    assert levels == {k: v.item() for k, v in alone.callback_metrics.items() if "loss_u" in k}
    assert len(levels) == 3
