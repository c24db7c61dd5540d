from functools import partial

import pytest
import torch
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import EMA, ConsistencyProbe
from lit_diffusion.metrics.image_distances import psnr

NAME = "val/consistency"


def fitted(folder, *callbacks, steps=12, module=None, ckpt_path=None, **options):
    memory = MemoryLogger()
    options |= {"max_steps": steps, "max_epochs": -1, "logger": memory}
    trainer = make_trainer(folder, *callbacks, **options)
    module = module or tiny_diffusion()
    trainer.fit(module, images(16, 4), ckpt_path=ckpt_path)
    return module, memory, trainer


def test_it_is_the_psnr_of_the_same_seeds_one_time_and_the_next(tmp_path):
    module, _, _ = fitted(tmp_path, steps=4)
    before = module.generate(range(5))
    module, memory, _ = fitted(tmp_path, ConsistencyProbe(5, every_n_steps=4), steps=8)
    (step, row), *others = memory.rows_with(NAME)
    assert (step, others) == (7, [])
    assert row[NAME] == pytest.approx(psnr(before, module.generate(range(5))).mean().item())


def test_weights_that_stand_still_give_the_cap_and_averages_are_used(tmp_path):
    still, ema = partial(torch.optim.SGD, lr=0.0), EMA((0.999999,), warmup=False)
    module = tiny_diffusion(optimizer=still)
    _, memory, _ = fitted(tmp_path, ConsistencyProbe(2, 2), module=module, steps=6)
    assert [row[NAME] for _, row in memory.rows_with(NAME)] == [100, 100]
    _, slow, _ = fitted(tmp_path, ema, ConsistencyProbe(2, 4), steps=8)
    assert slow.rows_with(NAME)[0][1][NAME] > 60


def test_at_validation_it_is_logged_for_all(tmp_path):
    trainer = make_trainer(tmp_path, ConsistencyProbe(2), max_epochs=3)
    trainer.fit(tiny_diffusion(), images(16, 4), images(8, 4))
    assert 0 < trainer.callback_metrics[NAME] < 100


def test_bad_numbers_and_modules_are_refused(tmp_path):
    with pytest.raises(ValueError, match="num must be at least 1, got 0"):
        ConsistencyProbe(0)
    with pytest.raises(TypeError, match="generate"):
        make_trainer(tmp_path, ConsistencyProbe(2, 1)).fit(PlainModule(), loader())
    with pytest.raises(ValueError, match="every_n_steps=None"):
        make_trainer(tmp_path, ConsistencyProbe(2)).fit(tiny_diffusion(), images(16, 4))
