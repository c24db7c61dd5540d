"""Processes and denoisers that solvers are tried on."""

import torch

from lit_diffusion.gaussian import expand_as
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearBetas
from lit_diffusion.protocols import Denoised
from support.golden import Z

SHAPE = (2, 3, 4, 4)
COSINE, LINEAR = DiscreteVP(CosineBetas(1000)), DiscreteVP(LinearBetas(1000))


class Recorder:
    """Remembers the states and times at which a denoiser was asked."""

    def __init__(self, denoise):
        self.denoise, self.states, self.times, self.first = denoise, [], [], None

    def __call__(self, x, t):
        self.states.append(x)
        self.times.append(t[0].item())
        denoised = self.denoise(x, t)
        self.first = denoised if self.first is None else self.first
        return denoised


def no_noise(x):
    raise AssertionError("a deterministic solver drew noise")


def k_diffusion_data(kind):
    """The exact denoisers of golden case 11, for alpha = 1."""

    def denoise(x, t):
        sigma = expand_as(t, x)
        if kind == "gauss":
            x0 = x * 0.25 / (0.25 + sigma**2)
        else:
            q = 0.04 + sigma**2
            x0 = (0.04 * x + sigma**2 * 0.5 * torch.tanh(0.5 * x / q)) / q
        return Denoised(x0, (x - x0) / sigma)

    return denoise


class NoiseOfStep:
    """Hands out Z(shape, first + n) in the n-th step of a solver with two evaluations a step."""

    def __init__(self, first, denoise):
        self.first, self.denoise = first, denoise

    def __call__(self, x):
        return Z(x.shape, self.first + len(self.denoise.times) // 2)
