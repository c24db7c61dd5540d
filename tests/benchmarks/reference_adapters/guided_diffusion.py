"""guided-diffusion: its networks, and guidance by a classifier."""

from functools import partial
from random import Random

import torch
from guided_diffusion import gaussian_diffusion, resample, respace, unet
from torch import Tensor, nn

from lit_diffusion.guidance import ClassifierScore, ClassifierShift
from lit_diffusion.modules.classifier import NoisyClassifier
from lit_diffusion.solvers import DDIM, DDPM
from reference_adapters import openai_diffusion
from reference_adapters.common import SHAPE, counted_noise, fill_, noise, worst
from reference_adapters.openai_diffusion import Case, sampled

LIBRARY = openai_diffusion.Library(gaussian_diffusion, respace, resample, unet)


class Classifier(nn.Module):
    """Logits of a noisy image."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, 4)

    def forward(self, x: Tensor, noise_label: Tensor) -> Tensor:
        shift = noise_label.double()[:, None, None, None] / 1000
        return self.linear(torch.tanh(x + shift).flatten(1))


def guidance(draw: Random, implicit: bool = False) -> float:
    """By the mean of DDPM's steps; `implicit`: by the score, for DDIM."""
    case, start, first = Case(LIBRARY, draw), noise(draw), draw.randrange(1000)
    labels, scale = torch.tensor([0, draw.randrange(4)]), draw.uniform(0.5, 5)
    classifier = fill_(Classifier())
    ours = NoisyClassifier(
        classifier, case.process, None, None, image_shape=SHAPE[1:], num_classes=4
    ).gradient(scale)

    def cond_fn(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            log_probability = classifier(x, t).log_softmax(1)[range(2), y].sum()
            return scale * torch.autograd.grad(log_probability, x)[0]

    loop = case.theirs.ddim_sample_loop if implicit else case.theirs.p_sample_loop
    options = {"cond_fn": cond_fn, "model_kwargs": {"y": labels}} | case.loop
    with counted_noise(first):
        theirs = loop(case.net, SHAPE, start, **options)
    guide = ClassifierScore(ours, case.clip) if implicit else ClassifierShift(ours)
    denoise = guide.guide(case.ours.denoise_for, labels, case.process, None)
    solver = DDPM(case.variance, case.steps, case.times, case.clip)
    solver = DDIM(case.steps, 0.0, case.times, clip=False) if implicit else solver
    return worst((sampled(case, solver, start, first, denoise), theirs))


COMPARISONS = openai_diffusion.comparisons_of(LIBRARY, openai_diffusion.DIFFUSION) | {
    "classifier guidance of DDPM": guidance,
    "classifier guidance of DDIM": partial(guidance, implicit=True),
    "U-Net": partial(openai_diffusion.guided_unet, LIBRARY),
    "U-Net, upsampler": partial(openai_diffusion.guided_unet, LIBRARY, upsampler=True),
    "U-Net, classifier": partial(openai_diffusion.classifier, LIBRARY),
}
