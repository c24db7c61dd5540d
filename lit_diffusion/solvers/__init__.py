"""Solvers: from noise to images, given a denoise function.

Solvers do not depend on networks or labels. The function `denoise(x_t, t)` hides parameterization
and guidance, and `randn_like` hides the source of random numbers. Coefficients are float64 scalars.
Images keep their dtype. For pixels, set `clip` to clamp x0 to [-1, 1]. For latents, do not set it.

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
