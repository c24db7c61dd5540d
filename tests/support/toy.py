"""Small models with known answers: the golden toy network, data with an exact denoiser."""

import torch
from torch import Tensor

from lit_diffusion.gaussian import expand_as
from lit_diffusion.processes import CosineBetas, DiscreteVP
from lit_diffusion.protocols import Denoised, Process


class FloatCodec:
    """A codec whose x0 are the images, which need not be pixels."""

    bounded = False

    def encoded_shape(self, image_shape):
        return image_shape

    def encode(self, images):
        return images

    def decode(self, x0):
        return x0


class EndsInNoise(DiscreteVP):
    """Cosine betas whose last step leaves nothing of the image: SNR = 0."""

    def __init__(self, num_steps=100):
        super().__init__(CosineBetas(num_steps))

    def __repr__(self):
        return "EndsInNoise()"

    def alpha_sigma(self, t):
        alpha, sigma = super().alpha_sigma(t)
        return alpha * (t < self.t_max), sigma


def toy_denoiser(process: Process, learned_range: bool = False, label=lambda t: t):
    """eps = (0.3 + 0.69 t / T) x + 0.1 sin(0.01 t), r = 1.2 sin(2 x + 0.01 t); golden README,
    section 3."""

    def denoise(x: Tensor, t: Tensor) -> Denoised:
        level = expand_as(label(t), x)
        noise = (0.3 + 0.69 * level / process.num_steps) * x + 0.1 * torch.sin(0.01 * level)
        alpha, sigma = (expand_as(v, x) for v in process.alpha_sigma(t))
        r = 1.2 * torch.sin(2 * x + 0.01 * level)
        frac = (r + 1) / 2 if learned_range else None
        return Denoised((x - sigma * noise) / alpha, noise, frac)

    return denoise


def gaussian_denoiser(process: Process, mean: float = 0.3, std: float = 0.5):
    """The exact E[x0 | x_t] for data N(mean, std^2)."""

    def denoise(x: Tensor, t: Tensor) -> Denoised:
        alpha, sigma = (expand_as(v, x) for v in process.alpha_sigma(t))
        gain = alpha * std**2 / (alpha**2 * std**2 + sigma**2)
        x0 = mean + gain * (x - alpha * mean)
        return Denoised(x0, (x - alpha * x0) / sigma)

    return denoise


def mixture_denoiser(process: Process, mean: float = 0.5, std: float = 0.2):
    """The exact E[x0 | x_t] for data half N(-mean, std^2), half N(mean, std^2)."""

    def denoise(x: Tensor, t: Tensor) -> Denoised:
        alpha, sigma = (expand_as(v, x) for v in process.alpha_sigma(t))
        variance = alpha**2 * std**2 + sigma**2
        side = mean * torch.tanh(mean * alpha * x / variance)
        x0 = (alpha * std**2 * x + sigma**2 * side) / variance
        return Denoised(x0, (x - alpha * x0) / sigma)

    return denoise


def gaussian_flow(process: Process, x: Tensor, t: float, mean: float = 0.3, std: float = 0.5):
    """Where the probability-flow ODE takes x_t of those data at t = 0: a straight rescaling about
    the mean."""
    alpha, sigma = process.alpha_sigma(torch.tensor([t]))
    return mean + std * (x - alpha * mean) / (alpha**2 * std**2 + sigma**2).sqrt()


def mixture_flow(process: Process, x: Tensor, t: Tensor, mean: float = 0.5, std: float = 0.2):
    """Where the flow takes x_t of that mixture, number by number: it keeps the share below.

    From the least noisy time on it is the guess of x0, as solvers take it.
    """

    def fraction_within(x: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = process.alpha_sigma(t)
        spread = ((alpha * std) ** 2 + sigma**2).sqrt()
        return sum(torch.special.ndtr((x + m * alpha) / spread) for m in (-mean, mean)) / 2

    t_min, wanted = torch.tensor(process.t_min, dtype=torch.float64), fraction_within(x, t)
    low, high = torch.full_like(x, -9.0), torch.full_like(x, 9.0)
    for _ in range(60):
        middle = (low + high) / 2
        is_less = fraction_within(middle, t_min) < wanted
        low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
    return mixture_denoiser(process, mean, std)(middle, t_min.expand(len(x))).x0


class CountedNoise:
    """Hands out Z(shape, first + n) as the n-th draw, the golden files' stand-in for randn_like."""

    def __init__(self, first: int) -> None:
        self.first, self.calls = first, 0

    def __call__(self, x: Tensor) -> Tensor:
        from support.golden import Z

        self.calls += 1
        return Z(x.shape, self.first + self.calls - 1)
