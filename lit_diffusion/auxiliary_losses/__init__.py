"""Additional terms of the training loss, such as losses on the features of a network's block."""

from lit_diffusion.auxiliary_losses.alignment import RepresentationAlignment
from lit_diffusion.auxiliary_losses.contrastive import ContrastiveFlow
from lit_diffusion.auxiliary_losses.dispersive import Dispersive
from lit_diffusion.auxiliary_losses.pretrained_encoder import PretrainedEncoder
from lit_diffusion.auxiliary_losses.self_teacher import SelfTeacher

__all__ = [
    "ContrastiveFlow",
    "Dispersive",
    "PretrainedEncoder",
    "RepresentationAlignment",
    "SelfTeacher",
]
