"""DiT: network, classifier-free guidance, and its copy of guided-diffusion's process."""

from random import Random

import torch
from diffusion import gaussian_diffusion, respace, timestep_sampler
from models import DiT
from support.toy import CountedNoise

from lit_diffusion.gaussian import LearnedRange
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.parameterizations import Epsilon
from lit_diffusion.processes import DiscreteVP, LinearBetas
from lit_diffusion.solvers import DDPM
from reference_adapters import openai_diffusion
from reference_adapters.common import counted_noise, fill_, module, outputs, worst
from reference_adapters.openai_diffusion import imported

names = {"cosine": "squaredcos_cap_v2", "rescales": False}
LIBRARY = openai_diffusion.Library(gaussian_diffusion, respace, timestep_sampler, **names)


def build(draw: Random, learned: bool) -> tuple[DiT, int]:
    heads = draw.choice([1, 2, 4])
    sizes = {"patch_size": draw.choice([1, 2, 4]), "depth": draw.randint(1, 3)}
    sizes |= {"mlp_ratio": draw.choice([2.0, 4.0]), "hidden_size": 32, "num_heads": heads}
    theirs = DiT(8, in_channels=3, num_classes=9, learn_sigma=learned, **sizes)
    return fill_(theirs), heads


def network(draw: Random) -> float:
    theirs, heads = build(draw, learned=draw.random() < 0.5)
    ours = imported(theirs, "dit", num_heads=heads)
    label = draw.randrange(9)
    labels = {"ours": (torch.tensor([label, -1]),), "theirs": (torch.tensor([label, 9]),)}
    new = type(ours)(8, 3, 3, theirs.x_embedder.patch_size[0], width=32, depth=1, num_heads=heads)
    off = outputs(ours, theirs, torch.randn(2, 3, 8, 8), torch.tensor([999.0, 12.0]), **labels)
    return max(off, worst((new.pos_embed, theirs.pos_embed)))  # which an import has from the file


def guidance(draw: Random) -> float:
    """Its sample.py on three channels, which are those that it guides."""
    theirs, heads = build(draw, learned=True)
    theirs.final_layer.linear.weight.data *= 0.3
    num, scale, first = draw.randint(50, 100), draw.uniform(1, 4), draw.randrange(1000)
    steps = draw.randint(5, 20)
    diffusion = respace.SpacedDiffusion(
        use_timesteps=respace.space_timesteps(num, [steps]),
        betas=gaussian_diffusion.get_named_beta_schedule("linear", num),
        model_mean_type=gaussian_diffusion.ModelMeanType.EPSILON,
        model_var_type=gaussian_diffusion.ModelVarType.LEARNED_RANGE,
        loss_type=gaussian_diffusion.LossType.MSE,
    )
    start, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, draw.randrange(9)])
    none, half = torch.full((2,), 9), CountedNoise(first)
    model_kwargs = {"y": torch.cat([labels, none]), "cfg_scale": scale}
    with counted_noise(source=lambda x: half(x[:2]).repeat(2, 1, 1, 1)):
        guided = diffusion.p_sample_loop(
            theirs.forward_with_cfg,
            (4, 3, 8, 8),
            start.repeat(2, 1, 1, 1),
            clip_denoised=False,
            model_kwargs=model_kwargs,
            device="cpu",
        )
    process = DiscreteVP(LinearBetas(num))
    network = imported(theirs, "dit", num_heads=heads)
    ours = module(network, process, Epsilon(), learned=True, num_classes=9)
    denoise = ClassifierFree(scale).guide(ours.denoise_for, labels, process, none * 0 - 1)
    solver = DDPM(LearnedRange(), steps, clip=False)
    with torch.no_grad():
        sample = solver.sample(denoise, process, start, CountedNoise(first))
    return worst((sample, guided[:2]))


COMPARISONS = openai_diffusion.comparisons_of(LIBRARY, openai_diffusion.DIFFUSION) | {
    "network": network,
    "classifier-free guidance of DDPM": guidance,
}
