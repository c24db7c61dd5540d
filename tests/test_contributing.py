"""The examples of CONTRIBUTING.md do what they say, and together train a model."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.testing import assert_close

from lit_diffusion.data.digits import Digits
from lit_diffusion.losses import DenoisingLoss, Simple
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.parameterizations import Velocity
from lit_diffusion.protocols import Denoised
from lit_diffusion.timesteps import Uniform

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    found = {"__name__": "contributing"}
    for block in BLOCKS:
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), found)
    return found


def test_each_example_is_about_fifteen_lines_of_code():
    for block in BLOCKS:
        code = [line for line in block.splitlines() if line.strip() and "import" not in line]
        assert len(code) <= 15


def test_the_process_finds_the_time_of_every_log_snr(names):
    process = names["Trigonometric"]()
    t = process.from_unit(torch.linspace(0, 1, 101, dtype=torch.float64))
    alpha, sigma = process.alpha_sigma(t)
    assert_close(alpha**2 + sigma**2, torch.ones_like(t))
    assert_close(process.at_log_snr(2 * (alpha / sigma).log()), t)


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_the_solver_converges_with_order_one_on_a_gaussian(names, scale):
    process = names["Trigonometric"]()
    noise = torch.randn(64, 1, 1, 1, dtype=torch.float64)

    def denoise(x_t, t):  # of data N(0, scale^2)
        alpha, sigma = (v.view(-1, 1, 1, 1) for v in process.alpha_sigma(t))
        x0 = scale**2 * alpha * x_t / (scale**2 * alpha**2 + sigma**2)
        return Denoised(x0, (x_t - alpha * x0) / sigma)

    def error(steps):
        solver = names["Deterministic"](steps)
        solver.check(process)
        x0 = solver.sample(denoise, process, noise, torch.randn_like)
        return (x0 / (scale * noise) - 1).abs().max()

    assert 1.7 < error(100) / error(200) < 2.3


def test_all_four_train_and_sample_together(names, tmp_path):
    network = names["Perceptron"]()
    module = DiffusionModule(
        network=network,
        process=names["Trigonometric"](),
        parameterization=Velocity(),
        loss=DenoisingLoss(Simple()),
        times=Uniform(),
        solver=names["Deterministic"](10),
        optimizer=torch.optim.Adam,
        image_shape=(1, 8, 8),
    )
    seen = []
    network.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    trainer = Trainer(
        default_root_dir=tmp_path,
        max_steps=4,
        limit_val_batches=0,
        callbacks=[names["NoisyHalfFirst"](2)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, Digits(batch_size=64))
    middle = 1000 * (0.01 + 1.56) / 2
    assert [bool((labels > middle).all()) for labels in seen] == [True, True, False, False]
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert module.generate(range(3)).shape == (3, 1, 8, 8)
