"""improved-diffusion, and what guided-diffusion and DiT have of it: `gaussian_diffusion`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support.toy import CountedNoise
from torch import Tensor
from torch.nn.functional import interpolate

from lit_diffusion.callbacks import LossSecondMomentResampler
from lit_diffusion.callbacks.loss_resampler import LossHistory, update_history
from lit_diffusion.gaussian import FixedLarge, FixedSmall, LearnedRange, posterior
from lit_diffusion.grids import Sections, Stride
from lit_diffusion.interchange.exported import build_network
from lit_diffusion.interchange.published import infer
from lit_diffusion.likelihood import bits_per_dim
from lit_diffusion.losses import DenoisingLoss, HybridLoss, Simple
from lit_diffusion.parameterizations import Epsilon, Sample
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearBetas
from lit_diffusion.protocols import Prediction, TimeGrid
from lit_diffusion.solvers import DDIM, DDPM
from reference_adapters.common import (
    SHAPE,
    Comparison,
    Net,
    counted_noise,
    fill_,
    images,
    module,
    noise,
    outputs,
    worst,
)

MEANS = {"EPSILON": Epsilon(), "START_X": Sample()}
VARIANCES = {"FIXED_SMALL": FixedSmall(), "FIXED_LARGE": FixedLarge()}
VARIANCES |= {"LEARNED_RANGE": LearnedRange()}


@dataclass(frozen=True)
class Library:
    """The modules of a reference, and what it calls its schedules."""

    gaussian_diffusion: ModuleType
    respace: ModuleType
    resample: ModuleType
    unet: ModuleType | None = None
    cosine: str = "cosine"
    rescales: bool = True


class Case:
    """A process, its grid, what a network says on it, and the same in their words."""

    def __init__(self, lib: Library, draw: Random, whole: bool = False, loss: str = "MSE") -> None:
        gd = lib.gaussian_diffusion
        num, kind = draw.randint(24, 100), draw.choice(["linear", "cosine"])
        rescaled = draw.random() < 0.5 and lib.rescales
        betas = {"linear": LinearBetas, "cosine": CosineBetas}[kind](num)
        self.process = DiscreteVP(betas, rescale_labels=rescaled)
        self.times, counts = (Sections(), [num]) if whole else respacing(draw, num)
        mean, variance = draw.choice(list(MEANS)), draw.choice(list(VARIANCES))
        self.parameterization, self.variance = MEANS[mean], VARIANCES[variance]
        self.clip, self.steps_of_base = draw.random() < 0.5, num
        self.theirs = lib.respace.SpacedDiffusion(
            use_timesteps=lib.respace.space_timesteps(num, counts),
            betas=gd.get_named_beta_schedule(lib.cosine if kind == "cosine" else kind, num),
            model_mean_type=gd.ModelMeanType[mean],
            model_var_type=gd.ModelVarType[variance],
            loss_type=gd.LossType[loss],
            **({"rescale_timesteps": rescaled} if rescaled else {}),
        )
        self.steps = self.theirs.num_timesteps
        size = 0.9 if mean == "EPSILON" else 0.2
        self.net = fill_(Net(6 if self.variance.learned else 3, size))
        learned = self.variance.learned
        self.ours = module(self.net, self.process, self.parameterization, learned)
        self.loop = {"clip_denoised": self.clip, "device": "cpu"}


def respacing(draw: Random, num: int) -> tuple[TimeGrid, Any]:
    """A grid of ours, and what their `space_timesteps` calls it."""
    kind = draw.randrange(4)
    if kind == 0:
        return Sections(), [num]
    if kind == 1:
        return Sections(), [draw.randint(2, num)]
    if kind == 2:
        counts = tuple(draw.randint(1, num // 4) for _ in range(draw.randint(2, 4)))
        return Sections(counts), list(counts)
    return Stride(), f"ddim{len(range(0, num, draw.randint(1, num // 3)))}"


def schedule(lib: Library, draw: Random) -> float:
    case = Case(lib, draw)
    grid = case.times.grid(case.process, case.steps)
    ours, theirs = posterior(case.process, grid), case.theirs
    alpha, sigma = case.process.alpha_sigma(grid[:-1])
    assert grid[:-1].flip(0).tolist() == theirs.timestep_map
    pairs = [
        (alpha, theirs.sqrt_alphas_cumprod),
        (sigma, theirs.sqrt_one_minus_alphas_cumprod),
        (ours.x0_coef, theirs.posterior_mean_coef1),
        (ours.xt_coef, theirs.posterior_mean_coef2),
        (ours.variance, theirs.posterior_variance),
        (ours.log_variance.exp(), torch.tensor(theirs.posterior_log_variance_clipped).exp()),
        (ours.log_beta.exp(), theirs.betas),
    ]
    return worst(*((a.flip(0), b) for a, b in pairs), each=True)


def loss(lib: Library, draw: Random) -> float:
    """Values per sample and gradients of the weights, at times and noise that are given."""
    kind = draw.choice(["MSE", "RESCALED_MSE"])
    case = Case(lib, draw, whole=True, loss=kind)
    if case.variance.learned:
        weight = 1 / case.steps if kind == "MSE" else 0.001
        case.ours.loss = HybridLoss(Simple(), weight)
    else:
        case.ours.loss = DenoisingLoss(Simple())
    x0, eps, t = images(draw), noise(draw), torch.tensor([0, draw.randrange(case.steps)])
    theirs = case.theirs.training_losses(case.net, x0, t, noise=eps)["loss"]
    ours = case.ours.per_sample_loss(x0, None, t.double(), eps)
    weights = list(case.net.conv.parameters())
    gradients = [torch.autograd.grad(value.sum(), weights) for value in (ours, theirs)]
    return worst((ours, theirs), *zip(*gradients, strict=True))


def bound(lib: Library, draw: Random) -> float:
    """The terms of use_kl=True: what ours calls "vb", and the bound of whole images."""
    case = Case(lib, draw, whole=True, loss=draw.choice(["KL", "RESCALED_KL"]))
    x0, eps, t = images(draw), noise(draw), torch.tensor([0, draw.randrange(1, case.steps)])
    first = draw.randrange(1000)
    with counted_noise(first):
        theirs = case.theirs.calc_bpd_loop(case.net, x0, clip_denoised=case.clip)
    grid = (case.variance, case.times, case.steps)
    denoise, draws = case.ours.denoise_for(None), CountedNoise(first)
    terms = bits_per_dim(denoise, case.process, x0, *grid, draws, case.clip)
    names = {"total": "total_bpd", "prior": "prior_bpd", "terms": "vb", "x0_mse": "xstart_mse"}
    names |= {"noise_mse": "mse"}
    pairs = [(getattr(terms, ours), theirs[name]) for ours, name in names.items()]
    if case.variance.learned:
        alpha, sigma = case.process.alpha_sigma(t.double())
        x_t = alpha[:, None, None, None] * x0 + sigma[:, None, None, None] * eps
        output, r = case.net(x_t, case.process.noise_label(t)).chunk(2, dim=1)
        prediction = Prediction(output, r, x0, x_t, t.double(), alpha, sigma)
        vb = HybridLoss(Simple()).bound_term(prediction, case.process, case.parameterization)
        rescaled = case.theirs.loss_type.name == "RESCALED_KL"
        expected = case.theirs.training_losses(case.net, x0, t, noise=eps)["loss"]
        pairs.append((vb * (case.steps if rescaled else 1), expected))
    return worst(*pairs)


def ancestral(lib: Library, draw: Random) -> float:
    case, start, first = Case(lib, draw), noise(draw), draw.randrange(1000)
    with counted_noise(first):
        theirs = case.theirs.p_sample_loop(case.net, SHAPE, start, **case.loop)
    solver = DDPM(case.variance, case.steps, case.times, case.clip)
    return worst((sampled(case, solver, start, first), theirs))


def ddim(lib: Library, draw: Random) -> float:
    case, start, first = Case(lib, draw), noise(draw), draw.randrange(1000)
    eta = draw.choice([0.0, 1.0, draw.random()])
    with counted_noise(first):
        theirs = case.theirs.ddim_sample_loop(case.net, SHAPE, start, **case.loop, eta=eta)
    solver = DDIM(case.steps, eta, case.times, case.clip)
    return worst((sampled(case, solver, start, first), theirs))


def sampled(case: Case, solver: Any, start: Tensor, first: int, denoise: Any = None) -> Tensor:
    with torch.no_grad():
        denoise = denoise or case.ours.denoise_for(None)
        return solver.sample(denoise, case.process, start, CountedNoise(first))


def inversion(lib: Library, draw: Random) -> float:
    case, x0 = Case(lib, draw), images(draw)
    x = x0
    with torch.no_grad():
        for t in range(case.steps):
            whole = torch.full((2,), t)
            x = case.theirs.ddim_reverse_sample(case.net, x, whole, case.clip)["sample"]
        solver = DDIM(case.steps, 0.0, case.times, case.clip)
        return worst((solver.invert(case.ours.denoise_for(None), case.process, x0), x))


def resampler(lib: Library, draw: Random) -> float:
    num = draw.randint(3, 12)
    size, share = draw.randint(2, 10), draw.choice([0.001, 0.1])
    diffusion = ModuleType("diffusion")
    diffusion.num_timesteps = num
    with patch.dict(vars(np), int=int):  # which numpy had when it was written
        theirs = lib.resample.LossSecondMomentResampler(diffusion, size, share)
    ours = LossSecondMomentResampler(num, size, share)
    history, pairs = LossHistory.empty(num, size), []
    for _ in range(60):
        t, values = torch.randint(num, (16,)), torch.rand(16) ** 3
        theirs.update_with_all_losses(t.tolist(), values.tolist())
        history = update_history(history, t, values)
        pairs.append((ours.density(history), theirs.weights()))
    return worst(*pairs)


def sizes(draw: Random, in_channels: int = 3) -> dict[str, Any]:
    """Of a U-Net, as both repositories call them."""
    mult = draw.choice([(1, 2), (1, 1, 2), (2, 1), (1, 2, 3)])
    return {
        "in_channels": in_channels,
        "model_channels": 32,
        "out_channels": draw.choice([3, 6]),
        "num_res_blocks": draw.randint(1, 2),
        "attention_resolutions": draw.sample([1, 2, 4][: len(mult)], draw.randint(0, len(mult))),
        "channel_mult": mult,
        "use_scale_shift_norm": draw.random() < 0.5,
        "num_classes": draw.choice([None, 5]),
    }


def imported(theirs: Any, kind: str, **overrides: Any) -> Any:
    """Their weights in the network that `convert import` builds for them."""
    network = build_network(*infer(theirs.state_dict(), kind, overrides)).eval()
    network.load_state_dict(theirs.state_dict())
    return network


def unet(lib: Library, draw: Random, upsampler: bool = False) -> float:
    """improved-diffusion's; with `upsampler` its SuperResModel."""
    heads = draw.choice([1, 2, 4])
    options = sizes(draw) | {"num_heads": heads, "num_heads_upsample": draw.choice([-1, 2])}
    if options["channel_mult"][0] != 1:  # its first convolution and its last are 1 wide
        options["channel_mult"] = (1, 2)
    theirs = fill_((lib.unet.SuperResModel if upsampler else lib.unet.UNetModel)(**options))
    up = options["num_heads_upsample"]
    arguments = {"num_heads": heads, "num_heads_upsample": None if up < 0 else up}
    arguments["num_res_blocks"] = options["num_res_blocks"]
    ours = imported(theirs, "improved-diffusion", **arguments)
    return compared(ours, theirs, options, draw, upsampler)


def guided_unet(lib: Library, draw: Random, upsampler: bool = False) -> float:
    """guided-diffusion's, with ResBlocks that resample and both orders of attention."""
    options = sizes(draw) | heads_of(draw)
    theirs = fill_((lib.unet.SuperResModel if upsampler else lib.unet.UNetModel)(8, **options))
    ours = imported(theirs, "guided-diffusion", **unseen_arguments(options))
    return compared(ours, theirs, options, draw, upsampler)


def heads_of(draw: Random, by_channels: bool = False) -> dict[str, Any]:
    by_channels = by_channels or draw.random() < 0.5
    heads = {"num_head_channels": 16} if by_channels else {"num_heads": draw.choice([1, 2])}
    return heads | {
        name: draw.random() < 0.5 for name in ("resblock_updown", "use_new_attention_order")
    }


def unseen_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What no shape tells."""
    heads = {"num_heads": "num_heads", "num_head_channels": "head_channels"}
    arguments = {ours: options[name] for name, ours in heads.items() if name in options}
    arguments["split_heads_first"] = not options["use_new_attention_order"]
    return arguments | {"num_res_blocks": options["num_res_blocks"]}


def compared(
    ours: Any, theirs: Any, options: dict[str, Any], draw: Random, upsampler: bool
) -> float:
    x, t = torch.randn(SHAPE), torch.tensor([draw.uniform(0, 999), 0.0])
    y = () if options["num_classes"] is None else (torch.tensor([4, draw.randrange(5)]),)
    if not upsampler:
        return outputs(ours, theirs, x, t, *y)
    low = torch.randn(2, 3, 4, 4)
    whole = torch.cat([x, interpolate(low, SHAPE[2:], mode="bilinear")], 1)
    with torch.no_grad():
        return worst((ours(whole, t, *y), theirs(x, t, low, **dict(zip("y", y, strict=False)))))


def classifier(lib: Library, draw: Random) -> float:
    options = sizes(draw) | heads_of(draw, by_channels=True) | {"out_channels": 7}
    del options["num_classes"]
    size = draw.choice([8, 16])
    theirs = fill_(lib.unet.EncoderUNetModel(size, **options, pool="attention"))
    ours = imported(theirs, "guided-diffusion", **unseen_arguments(options))
    return outputs(ours, theirs, torch.randn(2, 3, size, size), torch.tensor([0.0, 777.5]))


DIFFUSION = {
    "respaced betas, posterior tables": schedule,
    "losses per sample, and their gradients": loss,
    "bits/dim and its terms; use_kl": bound,
    "DDPM trajectories": ancestral,
    "DDIM trajectories, eta 0 to 1": ddim,
}
IMPROVED = DIFFUSION | {
    "DDIM inversion": inversion,
    "loss-second-moment resampler": resampler,
    "U-Net": unet,
    "U-Net, upsampler": partial(unet, upsampler=True),
}


def comparisons_of(lib: Library, named: dict[str, Callable[..., float]]) -> dict[str, Comparison]:
    return {name: partial(compare, lib) for name, compare in named.items()}
