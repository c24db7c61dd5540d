"""The first losses of the digits network, so that a change of numbers does not go unseen.

Where a change is meant, run `PYTHONPATH=tests python tests/integration/test_short_loss.py` and
write a line under "Numerics" of CHANGELOG.md.
"""

import json
from pathlib import Path

import pytest
import torch
from support.plain_module import make_trainer

from lit_diffusion.data.digits import Digits
from lit_diffusion.losses import DenoisingLoss, MinSNR
from lit_diffusion.lr_schedules import WarmupLinear
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.solvers import DDIM
from lit_diffusion.timesteps import Uniform

RECORDED = Path(__file__).parents[1] / "golden" / "short_loss.json"


def losses(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    module = DiffusionModule(
        UNet(1, 1, 32, (1, 2), num_res_blocks=1, norm_groups=8, num_classes=10),
        DiscreteVP(CosineBetas(1000)),
        Velocity(),
        DenoisingLoss(MinSNR()),
        Uniform(),
        DDIM(20),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        image_shape=(1, 8, 8),
        num_classes=10,
        label_dropout=0.1,
        lr_scheduler=lambda optimizer: WarmupLinear(optimizer, 20, 5),
    )
    values = []
    module.on_train_batch_end = lambda out, *_: values.append(out["loss"].item())
    options = {"max_epochs": -1, "gradient_clip_val": 1.0, "limit_val_batches": 0}
    trainer = make_trainer(None, max_steps=steps, **options)
    trainer.fit(module, Digits(batch_size=32, seed=0))
    return values


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_the_first_losses_are_those_recorded(monkeypatch, steps):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    assert losses(steps) == pytest.approx(json.loads(RECORDED.read_text())[:steps], rel=1e-4)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(losses(), indent=0) + "\n")
