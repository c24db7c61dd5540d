from types import SimpleNamespace

import pytest
import torch
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, assert_same_bits, loader, make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_diffusion.callbacks import EMA, GradientDiagnostics, NoiseLevelLoss
from lit_diffusion.callbacks.evaluation import read_fixed_images
from lit_diffusion.callbacks.noise_level_loss import noise_level_losses
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.seeding import PerSampleNoise


def logged(folder, module, batches, *callbacks, **options):
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.validate(module, batches, verbose=False)
    return {k: v for k, v in trainer.callback_metrics.items() if "loss_u" in k}


def test_values_do_not_depend_on_the_batch_size_or_on_what_was_drawn_before(tmp_path):
    module = tiny_diffusion()
    first = logged(tmp_path, module, images(50, 7), NoiseLevelLoss(4))
    torch.rand(5)
    assert_same_bits(logged(tmp_path, module, images(50, 50), NoiseLevelLoss(4)), first)
    assert list(first) == [f"val/loss_u{u}" for u in (0.125, 0.375, 0.625, 0.875)]
    assert len({v.item() for v in first.values()}) == 4


def test_each_value_is_the_mean_loss_of_its_level():
    module, codec = tiny_diffusion().eval(), PixelCodec()
    pixels, labels, indices = read_fixed_images(images(50, 7), 20)
    x0 = codec.encode(pixels)
    noise = PerSampleNoise(indices).randn_like(x0)
    losses = noise_level_losses(module, x0, labels, noise, [0.305, 0.705])
    for value, t in zip(losses, (30.0, 70.0), strict=True):
        times = torch.full((20,), t, dtype=torch.float64)
        expected = module.per_sample_loss(x0, labels, times, noise).double().mean()
        torch.testing.assert_close(value, expected)


def test_latents_of_four_columns_are_not_taken_for_images_with_channels_last():
    moments = torch.randn(5, 8, 4, 4)
    assert torch.equal(read_fixed_images(DataLoader(TensorDataset(moments), 2), 5).images, moments)


def test_training_steps_measure_training_images_with_averaged_weights(tmp_path):
    def measured(*callbacks):
        levels, memory = NoiseLevelLoss(2, every_n_steps=4), MemoryLogger()
        trainer = make_trainer(tmp_path, *callbacks, levels, max_epochs=2, logger=memory)
        trainer.fit(module := tiny_diffusion(), images(16, 4))
        return memory.rows_with("train/loss_u0.25")[-1][1], module

    ema = EMA((0.9,))
    averaged, module = measured(ema)
    assert list(averaged) == ["train/loss_u0.25", "train/loss_u0.75"]
    with ema.weights("ema"):
        expected = logged(tmp_path, module, images(16, 4), NoiseLevelLoss(2))
    assert list(averaged.values()) == [v.item() for v in expected.values()]
    raw, _ = measured()
    assert list(raw.values()) != [v.item() for v in expected.values()]


def test_validation_within_fit_measures_the_weights_that_it_uses(tmp_path):
    for order in (slice(None), slice(None, None, -1)):
        ema, levels = EMA((0.9,)), NoiseLevelLoss(2)
        trainer = make_trainer(tmp_path, *[ema, levels][order])
        trainer.fit(module := tiny_diffusion(), images(16, 4), images(12, 5))
        metrics = {k: v for k, v in trainer.callback_metrics.items() if "loss_u" in k}
        with ema.weights("ema"):
            expected = logged(tmp_path, module, images(12, 12), NoiseLevelLoss(2))
        assert_same_bits(metrics, expected)


def test_a_foreign_module_needs_four_attributes(tmp_path):
    class Foreign(PlainModule):
        def per_sample_loss(self, x0, labels, t, noise, step=None):
            assert labels is None
            return (self.inner(x0 + noise) - x0).pow(2).mean(1)

    module = Foreign()
    with pytest.raises(TypeError, match="Foreign lacks process, codec, num_classes"):
        logged(tmp_path, module, loader(), NoiseLevelLoss(3))
    module.codec, module.num_classes = SimpleNamespace(encode=lambda images: images), None
    module.process = DiscreteVP(CosineBetas(10))
    assert len(logged(tmp_path, module, loader(), NoiseLevelLoss(3))) == 3


def test_what_would_never_run_and_bad_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every_n_steps=1000"):
        make_trainer(tmp_path, NoiseLevelLoss()).fit(tiny_diffusion(), images(16, 4))
    for arguments in ({"num_levels": 0}, {"num_images": 0}, {"every_n_steps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            NoiseLevelLoss(**arguments)


def test_bfloat16_modules_are_measured_on_the_same_noise(tmp_path):
    module = tiny_diffusion()
    full = logged(tmp_path, module, images(50, 7), NoiseLevelLoss(4))
    half = logged(tmp_path, module, images(50, 7), NoiseLevelLoss(4), precision="bf16-true")
    for name, value in full.items():
        assert half[name].item() == pytest.approx(value.item(), rel=0.02)


@pytest.mark.parametrize("callback", [NoiseLevelLoss, GradientDiagnostics])
def test_data_without_indices_are_refused_before_the_first_step(callback, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(images(16, 4).dataset)

    trainer = make_trainer(tmp_path, callback(every_n_steps=1000), max_steps=2)
    with pytest.raises(ValueError, match="need a DataLoader over a data set with indices"):
        trainer.fit(tiny_diffusion(), DataLoader(Stream(), batch_size=4))
    assert trainer.global_step == 0
