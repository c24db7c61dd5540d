"""k-diffusion: samplers, grids, denoisers and their losses, log-likelihood."""

import math
from random import Random
from typing import Any

import torch
from k_diffusion import external, layers, sampling, utils
from support.solving import NoiseOfStep, Recorder
from support.toy import CountedNoise
from torch import Tensor

from lit_diffusion.callbacks.ema import ema_update_
from lit_diffusion.grids import Karras, LogSNR
from lit_diffusion.likelihood import flow_bits_per_dim
from lit_diffusion.losses import P2, DenoisingLoss, Simple, SoftMinSNR
from lit_diffusion.parameterizations import EDMPreconditioning, Epsilon, Velocity
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, EDMProcess, LinearBetas
from lit_diffusion.protocols import Denoised
from lit_diffusion.solvers import DPMSolverPP, DPMSolverPP2S, Euler, EulerAncestral, Heun
from reference_adapters.common import SHAPE, Net, counted_noise, fill_, images, module, noise, worst


class Case:
    """An EDM or a discrete model in their wrapper and in ours, and a grid of both."""

    def __init__(self, draw: Random) -> None:
        self.net, discrete = fill_(Net()), draw.random() < 0.5
        if discrete:
            betas = draw.choice([LinearBetas, CosineBetas])(draw.randint(30, 300))
            self.process, velocity = DiscreteVP(betas), draw.random() < 0.5
            alpha_bar = (1 - betas.betas()).cumprod(0)
            kind = "DiscreteVDDPMDenoiser" if velocity else "DiscreteEpsDDPMDenoiser"
            self.theirs = getattr(external, kind)(self.net, alpha_bar, quantize=False)
            self.ours = module(self.net, self.process, Velocity() if velocity else Epsilon())
        else:
            self.process = EDMProcess(draw.uniform(0.002, 0.05), draw.uniform(10, 80))
            data = draw.uniform(0.3, 1)
            self.weighting = draw.choice(["karras", "snr", "soft-min-snr"])
            inner = lambda x, sigma: self.net(x, sigma.log() / 4)  # noqa: E731
            self.theirs = layers.Denoiser(torch.nn.Identity(), data, self.weighting)
            self.theirs.inner_model.forward = inner
            self.ours = module(self.net, self.process, EDMPreconditioning(data))
        ends = torch.tensor([self.process.t_min, self.process.t_max])
        alpha, sigma = self.process.alpha_sigma(ends)
        self.low, self.high = (sigma / alpha).tolist()
        self.steps, rho = draw.randint(5, 20), draw.uniform(3, 9)
        self.grid = draw.choice([Karras(rho), LogSNR()])
        if isinstance(self.grid, Karras):
            self.sigmas = sampling.get_sigmas_karras(self.steps, self.low, self.high, rho)
        else:
            self.sigmas = sampling.get_sigmas_exponential(self.steps, self.low, self.high)

    def start(self, eps: Tensor) -> Tensor:
        t = torch.tensor(self.process.t_max)
        return self.process.prior(eps, t) / self.process.alpha_sigma(t)[0]

    def sampled(self, solver: Any, eps: Tensor, first: int, denoise: Any = None) -> Tensor:
        with torch.no_grad():
            denoise = denoise or self.ours.denoise_for(None)
            return solver.sample(denoise, self.process, eps, CountedNoise(first))


def sampler(draw: Random) -> float:
    case, eps, first = Case(draw), noise(draw), draw.randrange(1000)
    eta, name = draw.choice([0.0, 1.0, draw.random()]), draw.choice(list(SAMPLERS))
    solver, takes_eta = SAMPLERS[name]
    plain = {"steps": case.steps, "times": case.grid, "clip": False}
    ours = case.sampled(solver(**plain, **({"eta": eta} if takes_eta else {})), eps, first)
    options = {"eta": eta} if takes_eta else {}
    if name in ("dpmpp_2m_sde", "dpmpp_2s_ancestral", "euler_ancestral"):
        counted = CountedNoise(first)
        options["noise_sampler"] = lambda *_: counted(eps)
    run = getattr(sampling, f"sample_{name}")
    theirs = run(case.theirs, case.start(eps), case.sigmas, disable=True, **options)
    return worst((ours, theirs))


SAMPLERS = {
    "euler": (Euler, False),
    "euler_ancestral": (EulerAncestral, True),
    "heun": (Heun, False),
    "dpmpp_2m": (DPMSolverPP, False),
    "dpmpp_2m_sde": (DPMSolverPP, True),
    "dpmpp_2s_ancestral": (DPMSolverPP2S, True),
}


def third_order(draw: Random) -> float:
    """3M SDE on a model that says 0 twice: its second step is another than the authors' and ours.

    From the third on, where the two agree, it says what a network does.
    """
    case, eps, first = Case(draw), noise(draw), draw.randrange(1000)
    eta, counted, late = draw.choice([0.0, 1.0, draw.random()]), CountedNoise(first), case.sigmas[2]
    theirs = sampling.sample_dpmpp_3m_sde(
        lambda x, sigma: case.theirs(x, sigma) * bool(sigma[0] < 1.001 * late),
        case.start(eps),
        case.sigmas,
        disable=True,
        eta=eta,
        noise_sampler=lambda *_: counted(eps),
    )
    inner = case.ours.denoise_for(None)

    def denoise(x: Tensor, t: Tensor) -> Denoised:
        alpha, sigma = case.process.alpha_sigma(t[0])
        x0 = inner(x, t).x0 * bool(sigma / alpha < 1.001 * late)
        return Denoised(x0, (x - alpha * x0) / sigma)

    solver = DPMSolverPP(case.steps, case.grid, clip=False, order=3, eta=eta)
    return worst((case.sampled(solver, eps, first, denoise), theirs))


def churned(draw: Random) -> float:
    case, eps, first = Case(draw), noise(draw), draw.randrange(1000)
    while isinstance(case.process, DiscreteVP):  # it has no more noise than its last step
        case = Case(draw)
    ranges = {"churn": (0, 40), "tmin": (0, 1), "tmax": (2, 8), "noise": (0.9, 1.1)}
    churn = {f"s_{name}": draw.uniform(*ends) for name, ends in ranges.items()}
    with counted_noise(first):
        start = case.start(eps)
        theirs = sampling.sample_heun(case.theirs, start, case.sigmas, disable=True, **churn)
    denoise = Recorder(case.ours.denoise_for(None))
    solver = Heun(case.steps, case.grid, False, *churn.values())
    with torch.no_grad():
        ours = solver.sample(denoise, case.process, eps, NoiseOfStep(first, denoise))
    return worst((ours, theirs))


def loss(draw: Random) -> float:
    """Of a wrapped model at levels that are given, and what it denoises to."""
    case, x0, eps = Case(draw), images(draw), noise(draw)
    sigma = torch.tensor([draw.uniform(case.low, 1), draw.uniform(1, min(case.high, 50))])
    t = case.process.at_log_snr(-2 * sigma.log())
    if isinstance(case.process, EDMProcess):
        weights = {"karras": Simple(), "snr": P2(gamma=0.0)}
        weights["soft-min-snr"] = SoftMinSNR(1 / case.theirs.sigma_data**2)
        case.ours.loss = DenoisingLoss(weights[case.weighting])
    ours, theirs = case.ours.per_sample_loss(x0, None, t, eps), case.theirs.loss(x0, eps, sigma)
    noised = x0 + sigma[:, None, None, None] * eps
    alpha = case.process.alpha_sigma(t)[0][:, None, None, None]
    denoised = case.ours.denoise_for(None)(alpha * noised, t)
    return worst((ours, theirs), (denoised.x0, case.theirs(noised, sigma)))


def grids(draw: Random) -> float:
    case = Case(draw)
    alpha, sigma = case.process.alpha_sigma(case.grid.grid(case.process, case.steps))
    low, d, eps = draw.uniform(0.05, 0.2), draw.uniform(10, 25), draw.uniform(1e-4, 1e-2)
    a, s = ContinuousVP(low, d).alpha_sigma(torch.linspace(1, eps, 9))
    vp = sampling.get_sigmas_vp(9, d, low, eps)[:-1]
    return worst((sigma / alpha, case.sigmas), (s / a, vp), each=True)


def likelihood(draw: Random) -> float:
    """By an adaptive solver there and a fixed grid here, with the same random signs."""
    process, net = EDMProcess(draw.uniform(0.05, 0.2), draw.uniform(3, 10)), fill_(Net())
    theirs = layers.Denoiser(torch.nn.Identity(), 0.5)
    theirs.inner_model.forward = lambda x, sigma: net(x, sigma.log() / 4)
    ours, x0, seed = module(net, process, EDMPreconditioning(0.5)), images(draw), draw.randrange(99)
    torch.manual_seed(seed)
    ends = process.sigma_min, process.sigma_max
    log_p, _ = sampling.log_likelihood(theirs, x0, *ends, atol=1e-9, rtol=1e-9)
    torch.manual_seed(seed)
    signs = torch.randint_like(x0, 2) * 2 - 1
    bits = flow_bits_per_dim(ours.denoise_for(None), process, x0, LogSNR(), 200, 1, lambda x: signs)
    return worst((bits, -log_p / math.prod(SHAPE[1:]) / math.log(2)))


def averages(draw: Random) -> float:
    model, theirs, decay = Net(), Net(), draw.uniform(0.5, 1)
    ours = [p.clone() for p in theirs.parameters()]
    with torch.no_grad():
        for _ in range(20):
            fill_(model)
            utils.ema_update(model, theirs, decay)
            ema_update_(ours, list(model.parameters()), decay)
    return worst(*zip(ours, theirs.parameters(), strict=True))


COMPARISONS = {
    "samplers": sampler,
    "DPM-Solver++(3M) SDE, from its third step": third_order,
    "Heun with churn": churned,
    "denoisers and their losses": loss,
    "grids: Karras, exponential, VP": grids,
    "log-likelihood by the flow": likelihood,
    "EMA": averages,
}
