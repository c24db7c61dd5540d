"""lit-diffusion: PyTorch Lightning modules and callbacks for training diffusion models.

You can import the function `load` and the most used classes directly from `lit_diffusion`. The
package imports each of them on first access, so that `import lit_diffusion` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _NAMES, for type checkers
    from lit_diffusion.checkpoints import load as load
    from lit_diffusion.data.digits import Digits as Digits
    from lit_diffusion.data.image_folder import ImageFolder as ImageFolder
    from lit_diffusion.guidance import ClassifierFree as ClassifierFree
    from lit_diffusion.losses import DenoisingLoss as DenoisingLoss
    from lit_diffusion.losses import HybridLoss as HybridLoss
    from lit_diffusion.losses import MinSNR as MinSNR
    from lit_diffusion.losses import Simple as Simple
    from lit_diffusion.modules.diffusion import DiffusionModule as DiffusionModule
    from lit_diffusion.networks.dit import DiT as DiT
    from lit_diffusion.networks.jit import JiT as JiT
    from lit_diffusion.networks.unet import UNet as UNet
    from lit_diffusion.networks.uvit import UViT as UViT
    from lit_diffusion.parameterizations import EDMPreconditioning as EDMPreconditioning
    from lit_diffusion.parameterizations import Epsilon as Epsilon
    from lit_diffusion.parameterizations import FlowVelocity as FlowVelocity
    from lit_diffusion.parameterizations import Sample as Sample
    from lit_diffusion.parameterizations import Velocity as Velocity
    from lit_diffusion.processes import CosineBetas as CosineBetas
    from lit_diffusion.processes import DiscreteVP as DiscreteVP
    from lit_diffusion.processes import EDMProcess as EDMProcess
    from lit_diffusion.processes import LinearBetas as LinearBetas
    from lit_diffusion.processes import LinearFlow as LinearFlow
    from lit_diffusion.solvers import DDIM as DDIM
    from lit_diffusion.solvers import DDPM as DDPM
    from lit_diffusion.solvers import DPMSolverPP as DPMSolverPP
    from lit_diffusion.solvers import Euler as Euler
    from lit_diffusion.solvers import Heun as Heun
    from lit_diffusion.timesteps import LogitNormal as LogitNormal
    from lit_diffusion.timesteps import LogNormal as LogNormal
    from lit_diffusion.timesteps import Uniform as Uniform

_NAMES = {
    "checkpoints": ("load",),
    "data.digits": ("Digits",),
    "data.image_folder": ("ImageFolder",),
    "guidance": ("ClassifierFree",),
    "losses": ("DenoisingLoss", "HybridLoss", "MinSNR", "Simple"),
    "modules.diffusion": ("DiffusionModule",),
    "networks.dit": ("DiT",),
    "networks.jit": ("JiT",),
    "networks.unet": ("UNet",),
    "networks.uvit": ("UViT",),
    "parameterizations": ("EDMPreconditioning", "Epsilon", "FlowVelocity", "Sample", "Velocity"),
    "processes": ("CosineBetas", "DiscreteVP", "EDMProcess", "LinearBetas", "LinearFlow"),
    "solvers": ("DDIM", "DDPM", "DPMSolverPP", "Euler", "Heun"),
    "timesteps": ("LogNormal", "LogitNormal", "Uniform"),
}
_FILES = {name: file for file, names in _NAMES.items() for name in names}

__all__ = sorted(_FILES)
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    globals()[name] = value
    return value
