"""A DiffusionModule and image data small enough to train in a moment."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.losses import DenoisingLoss, Simple
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.parameterizations import Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.solvers import DDIM
from lit_diffusion.timesteps import Uniform

NUM_CLASSES = 3


class TinyNetwork(nn.Module):
    """Two convolutions that know noise level and label; has dropout."""

    def __init__(self, channels=1):
        super().__init__()
        self.enter = nn.Conv2d(channels, 8, 3, padding=1)
        self.label_embedding = nn.Embedding(NUM_CLASSES + 1, 8)
        self.dropout = nn.Dropout(0.1)
        self.leave = nn.Conv2d(8, channels, 3, padding=1)

    def forward(self, x, noise_label, labels):
        none = torch.full((len(x),), -1, device=x.device)
        h = (
            self.enter(x)
            + self.label_embedding((none if labels is None else labels) + 1)[..., None, None]
        )
        return self.leave(self.dropout(torch.tanh(h + noise_label.to(h).view(-1, 1, 1, 1) / 100)))


def tiny_diffusion(**changes):
    torch.manual_seed(0)
    arguments = {
        "network": TinyNetwork(),
        "process": DiscreteVP(CosineBetas(100)),
        "parameterization": Velocity(),
        "loss": DenoisingLoss(Simple()),
        "times": Uniform(),
        "solver": DDIM(3),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        "image_shape": (1, 8, 8),
        "num_classes": NUM_CLASSES,
        "label_dropout": 0.2,
    }
    return DiffusionModule(**{**arguments, **changes})


def images(num, batch_size):
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (num, 1, 8, 8), generator=generator, dtype=torch.uint8)
    index = torch.arange(num)
    return DataLoader(TensorDataset(pixels, index % NUM_CLASSES, index), batch_size=batch_size)


class FixedOutput(nn.Module):
    """Outputs the same tensor for every input."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x, noise_label, condition):
        return self.output


def losses_of(output, x0, t, noise, step=None, **parts):
    """(B,) losses of `per_sample_loss` where the network outputs `output`."""
    shape = tuple(x0.shape[1:])
    module = tiny_diffusion(network=FixedOutput(output), image_shape=shape, **parts)
    return module.per_sample_loss(x0, None, t, noise, step)
