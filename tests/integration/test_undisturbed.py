"""With any callback an unseeded module of somebody else's trains to the same bits as without."""

import random

import numpy as np
import pytest
import torch
from support.memory_logger import MemoryLogger
from support.pictures_module import PicturesModule, pictures
from support.pixels import PixelProtocol
from support.plain_module import assert_same_bits, make_trainer
from torch import nn

from lit_diffusion import callbacks
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.losses import DenoisingLoss, Simple
from lit_diffusion.parameterizations import Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.timesteps import Uniform


def draw():
    return torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002


class DrawingProtocol(PixelProtocol):
    """An extractor that draws its first weights."""

    def build(self):
        draw()
        return super().build()


QUIET = {  # each with arguments under which it changes nothing of training
    **{name: {} for name in ("EMA", "PowerEMA", "RankWatch", "SaveOnSignal", "FiniteUpdates")},
    "MomentumDecay": {"min_beta1": 0.9},
    "LRCompensation": {"beta0": 0.5, "min_beta1": 0.5},
    "FIDEvaluation": {"num_samples": 6, "extractor": DrawingProtocol([]), "weights": "raw"},
    "SampleGrid": {"num": 2},
    "NoiseLevelLoss": {"num_levels": 2},
    "TimestepCurriculum": {"num_steps": 4},
    "CurriculumWeight": {"num_steps": 4},
    "ImportanceWeightedCurriculum": {"num_steps": 4},
    "LossSecondMomentResampler": {"num_bins": 2, "history": 1},
    "LossDensity": {"num_bins": 2, "history": 1},
    "InfoNoise": {"num_bins": 2, "history": 1},
    "AdaptiveTimesteps": {"num_bins": 4, "every_n_steps": 1},
    "ConsistencyProbe": {"num": 2},
    "GradientDiagnostics": {"num_levels": 2, "num_images": 4},
}
CASES = [(name, {}) for name in QUIET]
CASES += [(n, {"every_n_steps": 1}) for n in ("FIDEvaluation", "SampleGrid", "NoiseLevelLoss")]
CASES += [(n, {"every_n_steps": 2}) for n in ("ConsistencyProbe", "GradientDiagnostics")]


class Drawing(PicturesModule):
    """Draws from every global generator; is told noise levels and does not listen."""

    process, codec, num_classes = DiscreteVP(CosineBetas(10)), PixelCodec(), None
    times, parameterization, loss = Uniform(), Velocity(), DenoisingLoss(Simple())
    timestep_density = timestep_weight = None

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def training_step(self, batch, batch_idx):
        self.norm(batch[0].float())
        losses = torch.rand(len(batch[0]))
        loss = super().training_step(batch, batch_idx) * draw() + 0 * losses.sum()
        return {"loss": loss, "u": losses, "per_sample_loss": losses}

    def per_sample_loss(self, x0, labels, t, noise, step=None):
        return (self.shift - x0 + self.dropout(noise)).pow(2).mean((1, 2, 3))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trained(folder, *used):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    module = Drawing()
    trainer = make_trainer(folder, *used, max_epochs=2, logger=MemoryLogger())
    trainer.fit(module, pictures(shuffle=True), pictures(12))
    return dict(module.state_dict()) | {"losses": module.losses}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    state = trained(tmp_path_factory.mktemp("alone"))
    assert len({*state["losses"]}) == 8
    return state


def test_no_callback_is_left_out():
    """But the one that is there to change the random numbers."""
    assert {*QUIET} == {*callbacks.__all__} - {"StepSeed"}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_training_is_the_same_with_it(tmp_path, monkeypatch, alone, name, options):
    monkeypatch.chdir(tmp_path)
    callback = getattr(callbacks, name)(**QUIET[name], **options)
    if name == "FIDEvaluation":
        callback.cache = tmp_path
    assert_same_bits(trained(tmp_path, callback), alone)
