"""Solvers, which turn noise into images with a function that denoises images.

Solvers do not depend on networks or labels. A solver calls the function `denoise(x_t, t)`,
which contains the network, its parameterization and guidance. A solver draws random numbers with
the function `randn_like(x_t)`. The coefficients of a step are float64 scalars, and images keep
their dtype. With `clip=True`, solvers clamp each estimate of x0 to [-1, 1]. Use `clip=True` for
pixels and `clip=False` for latents.

Example:
    >>> from lit_diffusion.processes import LinearFlow
    >>> from lit_diffusion.protocols import Denoised
    >>> def denoise(x_t, t):  # the exact model if all images are 0.5
    ...     x0 = torch.full_like(x_t, 0.5)
    ...     return Denoised(x0, noise=(x_t - (1 - t[0]) * x0) / t[0])
    >>> noise = torch.randn(2, 1, 8, 8)
    >>> x0 = Euler(steps=10).sample(denoise, LinearFlow(), noise, torch.randn_like)
    >>> round(x0.mean().item(), 4), round(x0.std().item(), 4)
    (0.5, 0.0)
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
