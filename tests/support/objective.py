"""The objective of DiffusionModule on a network whose output a test chooses."""

from torch import Tensor, nn, optim

from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.solvers import Euler
from lit_diffusion.timesteps import Uniform


class FixedOutput(nn.Module):
    """Outputs the same tensor for every input."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x, noise_label, condition):
        return self.output


def losses_of(output, x0, t, noise, *, process, parameterization, loss, step=None):
    """(B,) losses of `per_sample_loss` where the network outputs `output`."""
    module = DiffusionModule(
        FixedOutput(output),
        process,
        parameterization,
        loss,
        Uniform(),
        Euler(2),
        optim.Adam,
        image_shape=tuple(x0.shape[1:]),
    )
    return module.per_sample_loss(x0, None, t, noise, step)
