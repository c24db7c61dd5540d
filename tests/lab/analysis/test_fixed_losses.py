from argparse import Namespace
from pathlib import Path

import pytest
import torch
from support.commands import call
from support.small_digits import write_small_digits
from torch import nn

from lit_diffusion.checkpoints.loading import load_module
from lit_diffusion.data.digits import Digits
from lit_diffusion.lab.analysis.fixed_losses import (
    fixed_batch,
    fixed_losses,
    movable,
    refuse_other_losses,
    training_data,
)
from lit_diffusion.lab.analysis.weights import ExactSpectralNorm
from lit_diffusion.seeding import PerSampleNoise, index_uniforms


def asked(images=6, levels=(0.3, 0.8)):
    return Namespace(
        images=images, levels=list(levels), trust=[], weights="raw", device="cpu", data=None
    )


@pytest.fixture
def loaded(folder):
    write_small_digits(Path("a/checkpoints/last.ckpt"))
    return load_module("a", "raw")


def test_images_are_even_over_the_set_and_encoded(loaded):
    data = Digits().dataset("train")
    x0, labels, index = fixed_batch(loaded.module, data, 5)
    assert index.tolist() == [i * len(data) // 5 for i in range(5)]
    images, expected, _ = data.fetch([0] * 5, index.tolist())
    torch.testing.assert_close(x0, images / 127.5 - 1)
    assert torch.equal(labels, expected)


def test_losses_are_of_their_level_or_of_a_level_by_index(loaded):
    module, args = loaded.module, asked()
    found = fixed_losses(module, training_data(loaded, args), args)
    assert list(found) == ["u = 0.3", "u = 0.8", "all"]
    x0, labels, index = fixed_batch(module, Digits().dataset("train"), 6)
    noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)
    levels = (torch.full((6,), 0.3), torch.full((6,), 0.8), index_uniforms(index))
    for loss, u in zip(found.values(), levels, strict=True):
        t = module.process.from_unit(u.double())
        expected = module.per_sample_loss(x0, labels, t, noise).mean()
        assert loss().item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"images": 1}, "--images must be 2 to 1437, got 1"),
        ({"images": 1438}, "--images must be 2 to 1437, got 1438"),
        ({"levels": (0.5, 1.1)}, "--levels must be different numbers"),
        ({"levels": (float("nan"),)}, "--levels must be different numbers"),
        ({"levels": (0.1234567, 0.1234568)}, "--levels must be different numbers"),
        ({"levels": ()}, "--levels must be different numbers"),
    ],
)
def test_numbers_out_of_range_are_refused(loaded, options, told):
    args = asked(**options)
    with pytest.raises(ValueError, match=told):
        fixed_losses(loaded.module, training_data(loaded, args), args)


def test_a_module_without_levels_is_told_what_it_lacks(loaded):
    class Plain(nn.Module):
        device = torch.device("cpu")
        codec = loaded.module.codec

    with pytest.raises(ValueError, match="Plain lacks per_sample_loss and process"):
        fixed_losses(Plain(), training_data(loaded, asked()), asked())


def test_models_that_differ_in_how_times_are_drawn_alone_share_their_losses(loaded):
    other = load_module("a", "raw")
    kinds = other.checkpoint["hyper_parameters"]
    kinds["times"] = {"class_path": "lit_diffusion.timesteps.LogNormal"}
    refuse_other_losses(loaded, [other])
    kinds["loss"] = {"class_path": "lit_diffusion.losses.HybridLoss"}
    with pytest.raises(ValueError, match=r"the loss of a/checkpoints/last\.ckpt is"):
        refuse_other_losses(loaded, [other])


def test_data_that_a_config_does_not_name_are_asked_for(loaded):
    Path("a/config.yaml").write_text("data: null")
    with pytest.raises(ValueError, match=r"a/checkpoints/last\.ckpt names no data with splits"):
        training_data(loaded, asked())


@pytest.mark.usefixtures("folder")
def test_spectral_norm_follows_weights_that_move():
    config = Path(__file__).parents[2] / "configs/digits-biggan.yaml"
    said = "--trainer.max_steps=2 --trainer.callbacks=null --trainer.default_root_dir=gan"
    assert call(f"fit --config {config} {said}") == 0
    module = movable("gan", asked()).module
    kinds = [type(part).__name__ for part in module.modules()]
    assert ExactSpectralNorm.__name__ in kinds
    assert "_SpectralNorm" not in kinds
