"""Solvers: from noise to images, given a denoise function.

Solvers do not depend on networks or labels: `denoise(x_t, t)` hides parameterization and guidance,
and `randn_like` the source of randomness. Coefficients are float64 scalars; images keep their
dtype. x0 is clamped to [-1, 1] (`clip`) for pixels, never for latents.
"""

from lit_diffusion.solvers.ancestral import DDIM, DDPM, Euler, EulerAncestral
from lit_diffusion.solvers.exponential import DPMSolverPP, DPMSolverPP2S, UniPC
from lit_diffusion.solvers.heun import Heun

__all__ = [
    "DDIM",
    "DDPM",
    "DPMSolverPP",
    "DPMSolverPP2S",
    "Euler",
    "EulerAncestral",
    "Heun",
    "UniPC",
]
