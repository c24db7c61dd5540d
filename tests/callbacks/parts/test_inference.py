import random

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from support.plain_module import PlainModule, make_trainer

from lit_diffusion.callbacks import EMA, FIDEvaluation, NoiseLevelLoss, SampleGrid
from lit_diffusion.callbacks.parts.inference import averaged_weights, inference


def test_random_numbers_modes_and_gradients_are_as_before(tmp_path):
    module, trainer = PlainModule(), make_trainer(tmp_path)
    module.train()
    module.inner[1].eval()
    modes = [m.training for m in module.modules()]

    def draws():
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    expected = draws()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # noqa: NPY002
    with inference(trainer, module):
        draws()
        assert not any(m.training for m in module.modules())
        made = module.inner(torch.ones(2, 4))
    assert draws() == expected
    assert [m.training for m in module.modules()] == modes
    assert not made.requires_grad
    assert not made.is_inference()
    (made.sum() * module.inner[0].weight.sum()).backward()


def test_the_precision_of_the_trainer_is_used(tmp_path):
    module = PlainModule()
    with inference(make_trainer(tmp_path, precision="bf16-mixed"), module):
        assert module.inner(torch.ones(2, 4)).dtype == torch.bfloat16


def test_weights_are_raw_where_no_callback_has_others(tmp_path):
    with averaged_weights(make_trainer(tmp_path)) as name:
        assert name == "raw"


@pytest.mark.parametrize("kind", [lightning.pytorch, pytorch_lightning])
@pytest.mark.parametrize("ours", [SampleGrid(2), FIDEvaluation(2, "digits-cnn"), NoiseLevelLoss()])
def test_averages_that_lightning_puts_in_place_by_itself_are_refused_by_name(ours, kind):
    theirs = kind.callbacks.EMAWeightAveraging()
    trainer = kind.Trainer(callbacks=[ours, theirs], accelerator="cpu", logger=False)
    message = rf"{type(ours).__name__} cannot know .* beside EMAWeightAveraging.*callbacks.EMA"
    with pytest.raises(ValueError, match=message):
        ours.setup(trainer, PlainModule(), "fit")


def test_all_providers_put_their_averages_in_place(tmp_path):
    from support.plain_module import assert_close, loader, trainable

    emas = EMA((0.9,), prefix="inner.0"), EMA((0.9,), prefix="inner.3")
    module, trainer = PlainModule(), make_trainer(tmp_path, *emas)
    trainer.fit(module, loader())
    with averaged_weights(trainer) as name:
        assert name == "ema"
        for ema in emas:
            average = ema.state_dict()["shadows"][0]
            assert_close({k: trainable(module)[k] for k in average}, average, 0)
