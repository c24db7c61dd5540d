"""diffusers: schedulers, networks, betas, training targets, RePaint."""

from dataclasses import replace
from random import Random
from typing import Any

import diffusers
import torch
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from diffusers.training_utils import EMAModel, compute_snr
from support.schedulers import FixedTimes, both
from support.toy import mixture_denoiser
from torch import Tensor

from lit_diffusion.callbacks.ema import span_decay
from lit_diffusion.gaussian import FixedLarge, FixedSmall
from lit_diffusion.interchange import diffusers_dit, diffusers_unet
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import Velocity
from lit_diffusion.processes import (
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    GivenBetas,
    LinearBetas,
    LinearFlow,
    ZeroTerminalSNR,
)
from lit_diffusion.solvers import (
    DDIM,
    DDPM,
    DPMSolverPP,
    DPMSolverPP2S,
    Euler,
    EulerAncestral,
    Heun,
    UniPC,
)
from lit_diffusion.solvers.editing import RePaint
from reference_adapters.common import SHAPE, fill_, images, noise, outputs, worst


def discrete(draw: Random) -> tuple[DiscreteVP, dict[str, Any]]:
    num = draw.randint(50, 1000)
    betas = draw.choice([LinearBetas, CosineBetas])(num).betas()
    options = {"trained_betas": betas.numpy(), "num_train_timesteps": num}
    return DiscreteVP(GivenBetas(betas.tolist())), options


def on_betas(draw: Random) -> tuple[str, dict[str, Any], Any]:
    """Name and options of a scheduler, and our solver."""
    name = draw.choice(DISCRETE)
    if name == "DPMSolverMultistepScheduler":
        order, eta = draw.choice([1, 2, 3]), draw.choice([0.0, 1.0])
        order = min(order, 2) if eta else order  # a sign is wrong in the third order of their SDE
        options = {"solver_order": order, "lower_order_final": False}
        options["algorithm_type"] = "sde-dpmsolver++" if eta else "dpmsolver++"
        return name, options | spacing(draw), DPMSolverPP(order=order, eta=eta)
    if name == "DPMSolverSinglestepScheduler":
        return name, {"use_exponential_sigmas": True} | prediction(draw), DPMSolverPP2S()
    if name == "UniPCMultistepScheduler":
        order = draw.choice([1, 2, 3])
        return name, {"solver_order": order} | spacing(draw), UniPC(order=order)
    if name == "EulerAncestralDiscreteScheduler":
        options = {"prediction_type": draw.choice(["epsilon", "v_prediction"])}
        return name, options, EulerAncestral()
    if name == "DDPMScheduler":
        variance = draw.choice([FixedSmall(), FixedLarge()])
        kind = {FixedSmall(): "fixed_small", FixedLarge(): "fixed_large"}[variance]
        return name, {"variance_type": kind} | prediction(draw), DDPM(variance)
    if name == "DDIMScheduler":
        options = prediction(draw)
        return name, options, DDIM(eta=draw.choice([0.0, 1.0, draw.random()]))
    solver = Euler() if name == "EulerDiscreteScheduler" else Heun()
    return name, prediction(draw) | sigmas(draw), solver


def prediction(draw: Random) -> dict[str, Any]:
    return {"prediction_type": draw.choice(["epsilon", "sample", "v_prediction"])}


def sigmas(draw: Random) -> dict[str, Any]:
    return draw.choice([{}, {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}])


def spacing(draw: Random) -> dict[str, Any]:
    flow = {"use_flow_sigmas": True, "flow_shift": draw.uniform(0.5, 5)}
    plain = prediction(draw) | sigmas(draw)
    return draw.choice([plain, plain, flow | {"prediction_type": "flow_prediction"}])


DISCRETE = ["DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"]
DISCRETE += ["UniPCMultistepScheduler", "EulerDiscreteScheduler"]
DISCRETE += ["EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler"]
DISCRETE += ["DDPMScheduler", "DDIMScheduler"]


def scheduler(draw: Random) -> float:
    name, options, solver = on_betas(draw)
    process, betas = discrete(draw)
    steps, clip = draw.randint(4, 20), draw.random() < 0.5 and "DD" in name
    if options.get("use_flow_sigmas"):
        process, betas = LinearFlow(), {}
    if name == "DPMSolverSinglestepScheduler":
        steps += steps % 2 == 0
    if "DD" in name:
        options["clip_sample"] = clip
    scheduler = getattr(diffusers, name)(**betas, **options)
    scheduler.set_timesteps(steps)
    called = {"eta": solver.eta} if name == "DDIMScheduler" else {}
    called |= {"use_clipped_model_output": True} if called and clip else {}
    solver, denoise = replace(solver, clip=clip), mixture_denoiser(process)
    return worst(both(scheduler, solver, process, denoise, noise(draw), **called)[::-1])


def flow_and_edm(draw: Random) -> float:
    """Schedulers whose processes have no betas."""
    steps = draw.randint(4, 20)
    if draw.random() < 0.4:
        process, solver = LinearFlow(), Euler(clip=False)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=draw.uniform(0.5, 5))
    else:
        low, high = draw.uniform(0.002, 0.05), draw.uniform(10, 80)
        kind = draw.choice(["karras", "exponential"])
        options = {"sigma_min": low, "sigma_max": high, "sigma_data": draw.uniform(0.3, 1)}
        options |= {"sigma_schedule": kind, "rho": draw.uniform(3, 9)}
        process, order = EDMProcess(low, high), draw.choice([0, 1, 2, 3])
        if order == 0:
            scheduler, solver = diffusers.EDMEulerScheduler(**options), Euler(clip=False)
        else:
            eta = draw.choice([0.0, 1.0]) if order < 3 else 0.0
            options |= {"solver_order": order, "lower_order_final": False}
            options["algorithm_type"] = "sde-dpmsolver++" if eta else "dpmsolver++"
            scheduler = diffusers.EDMDPMSolverMultistepScheduler(**options)
            solver = DPMSolverPP(order=order, eta=eta, clip=False)
    scheduler.set_timesteps(steps)
    theirs, ours = both(scheduler, solver, process, mixture_denoiser(process), noise(draw))
    return worst((ours, theirs))


def training(draw: Random) -> float:
    """Noised images, velocities, SNR; betas, and those that end without signal."""
    process, betas = discrete(draw)
    scheduler = diffusers.DDPMScheduler(**betas)
    t = torch.tensor([0, draw.randrange(process.num_steps)])
    x0, eps = images(draw), noise(draw)
    alpha, sigma = (v[:, None, None, None] for v in process.alpha_sigma(t.double()))
    snr = (alpha / sigma).flatten() ** 2
    rescaled = rescale_zero_terminal_snr(process.betas.betas())
    cosine = diffusers.DDPMScheduler(process.num_steps, beta_schedule="squaredcos_cap_v2").betas
    return worst(
        (alpha * x0 + sigma * eps, scheduler.add_noise(x0, eps, t)),
        (Velocity().target(x0, eps, alpha, sigma), scheduler.get_velocity(x0, eps, t)),
        (snr, compute_snr(scheduler, t)),
        (ZeroTerminalSNR(process.betas).betas(), rescaled),
        (CosineBetas(process.num_steps).betas(), cosine),
    )


def unet(draw: Random) -> float:
    mult = draw.choice([(1, 2), (1, 1), (1, 2, 3)])
    arguments = {"in_channels": 3, "out_channels": draw.choice([3, 6]), "model_channels": 32}
    arguments |= {"channel_mult": mult, "num_res_blocks": draw.randint(1, 2)}
    attention = draw.sample([1, 2, 4][: len(mult)], draw.randint(0, 2))
    arguments |= {"attention_downsample": tuple(attention)}
    arguments |= {"head_channels": draw.choice([8, 16, 32]), "num_classes": draw.choice([None, 5])}
    for name in ("scale_shift_norm", "resblock_updown", "split_heads_first"):
        arguments[name] = draw.random() < 0.5
    arguments["norm_groups"] = draw.choice([8, 16, 32])
    ours = fill_(UNet(**arguments))
    config = diffusers_unet.to_config(arguments)
    theirs = diffusers.UNet2DModel(sample_size=8, **config).eval()
    theirs.load_state_dict(diffusers_unet.to_diffusers(ours.state_dict(), arguments))
    return compared(ours, theirs, draw, arguments["num_classes"])


def dit(draw: Random) -> float:
    heads = draw.choice([1, 2, 4])
    arguments = {"image_size": 8, "in_channels": 3, "out_channels": draw.choice([3, 6])}
    arguments |= {"patch_size": draw.choice([2, 4]), "width": 32, "depth": draw.randint(1, 3)}
    arguments |= {"num_heads": heads, "num_classes": 5}
    ours = fill_(DiT(**arguments))
    theirs = diffusers.DiTTransformer2DModel(**diffusers_dit.to_config(arguments)).eval()
    theirs.load_state_dict(diffusers_dit.to_diffusers(ours.state_dict()), strict=False)
    for block in theirs.transformer_blocks:  # as `diffusers_dit.FIX_FREQUENCIES`
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return compared(ours, theirs, draw, 5)


def compared(ours: Any, theirs: Any, draw: Random, num_classes: int | None) -> float:
    call = theirs.forward
    theirs.forward = lambda *inputs: call(*inputs).sample
    labels = {}
    if num_classes:
        label = draw.randrange(num_classes)
        labels["ours"] = (torch.tensor([label, -1]),)
        labels["theirs"] = (torch.tensor([label, num_classes]),)
    t = torch.tensor([0, draw.randrange(1000)])
    return outputs(ours, theirs, torch.randn(SHAPE), t, **labels)


def repaint(draw: Random) -> float:
    """Without resampling, and with eta = 1, which is our posterior variance."""
    process, betas = DiscreteVP(LinearBetas(60)), LinearBetas(60).betas().numpy()
    scheduler = diffusers.RePaintScheduler(60, eta=1.0, clip_sample=False, trained_betas=betas)
    steps, known, start = draw.choice([5, 10, 20, 60]), images(draw), noise(draw)
    scheduler.set_timesteps(steps, jump_length=1, jump_n_sample=1)
    mask = (torch.rand(2, 1, 8, 8) < draw.random()).double()
    denoise, x = mixture_denoiser(process), start
    generator = torch.Generator().manual_seed(0)
    for t in scheduler.timesteps:
        denoised = denoise(x, t.double().expand(2))
        x = scheduler.step(denoised.noise, t, x, known, mask, generator).prev_sample
    generator = torch.Generator().manual_seed(0)
    drawn: list[Tensor] = []

    def twice(x: Tensor) -> Tensor:
        """What is made and what is known have one draw of noise there."""
        if not drawn:
            drawn.append(torch.randn(x.shape, generator=generator))
            return drawn[0]
        return drawn.pop()

    times = FixedTimes(tuple(scheduler.timesteps.tolist()))
    solver = RePaint(known, mask, steps, 1, times, clip=False)
    return worst((solver.sample(denoise, process, start, twice), x))


def warmup(draw: Random) -> float:
    """Of EMA; their first update copies, as the decay of ours is 0.1 there."""
    decay, steps = draw.uniform(0.5, 0.9999), range(1, 200)
    theirs = EMAModel([torch.zeros(1)], decay=decay)
    pairs = [(span_decay(decay, n, n + 1, True), theirs.get_decay(n + 1)) for n in steps]
    return worst(*pairs)


COMPARISONS = {
    "schedulers on betas, and flow sigmas": scheduler,
    "schedulers of flow matching and EDM": flow_and_edm,
    "noising, velocity, SNR, betas, zero terminal SNR": training,
    "UNet2DModel": unet,
    "DiTTransformer2DModel": dit,
    "RePaint without resampling": repaint,
    "warm-up of EMA's decay": warmup,
}
