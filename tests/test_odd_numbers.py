"""Constructors refuse numbers out of range, by name, before torch or a training run meets them.

Weightings, schedules of betas and grids are checked by what they are given to.
"""

import math
from collections.abc import Sequence
from inspect import signature
from typing import get_args, get_origin, get_type_hints

import pytest
import torch

from lit_diffusion.lab.gan.biggan import BigGANDiscriminator, BigGANGenerator
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.networks.conditions import Classes, Tokens, Vectors, WordIds
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.magnitude_preserving import MagnitudePreservingUNet
from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.networks.uvit import UViT
from lit_diffusion.parameterizations import EDMPreconditioning
from lit_diffusion.processes import ContinuousVP
from lit_diffusion.solvers.ancestral import DDIM, Euler
from lit_diffusion.solvers.heun import Heun

SIZES = {"image_size": 16, "in_channels": 1, "out_channels": 1}
GAN = {"num_classes": 2, "in_channels": 1, "out_channels": 1}
LABELLED = {"num_classes": 2, "dim": 2, "num_words": 2}
KINDS = {
    **dict.fromkeys((UNet, EncoderUNet, DiT, UViT, JiT, DCGANGenerator, DCGANDiscriminator), SIZES),
    MagnitudePreservingUNet: {"in_channels": 1, "out_channels": 1, "fourier_bandwidth": 1.0},
    **dict.fromkeys((BigGANGenerator, BigGANDiscriminator), GAN),
    **dict.fromkeys((Classes, Vectors, Tokens, WordIds), LABELLED),
    **{kind: {} for kind in (EDMPreconditioning, ContinuousVP, DDIM, Euler, Heun)},
}
INFINITE_IS_FINE = {"churn", "churn_max", "churn_min"}
ZERO_IS_FINE = INFINITE_IS_FINE | {"dropout", "eta", "churn_noise"}
ZERO_IS_FINE |= {"in_context_tokens", "unhalved", "attention_at"}
ANY = {"in_context_start"}  # checked where they are used


def odd_arguments(kind):
    """(name, value) for every number in the signature of a class."""
    hints = get_type_hints(kind.__init__)
    for name in signature(kind).parameters.keys() - ANY:
        types = get_args(hints[name]) or (hints[name],)
        values = [-1] * bool({int, float} & set(types))
        values += [0] * bool(values and name not in ZERO_IS_FINE)
        if float in types:
            values += [math.nan] + [math.inf] * (name not in INFINITE_IS_FINE)
        is_sequence = get_origin(hints[name]) in (tuple, Sequence)
        yield from ((name, (value,) if is_sequence else value) for value in values)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_numbers_are_refused_by_the_constructor(kind):
    required = {n: v for n, v in KINDS[kind].items() if n in signature(kind).parameters}
    cases = list(odd_arguments(kind))
    assert cases
    for name, value in cases:
        refused = pytest.raises(ValueError, match=r"got|must")
        with refused as caught, torch.device("meta"):
            kind(**{**required, name: value})
        origin = caught.traceback[-1].frame.f_globals["__name__"]
        assert origin.startswith("lit_diffusion"), (name, value)


@pytest.mark.parametrize("groups", [-1, 0, 5])
def test_groups_that_no_norm_has_are_refused(groups):
    with pytest.raises(ValueError, match="groups"):
        UNet(1, 1, model_channels=32, norm_groups=groups)
