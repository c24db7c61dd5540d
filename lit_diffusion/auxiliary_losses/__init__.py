"""Additional terms of the training loss, such as losses on the features of a network's block."""

from lit_diffusion.auxiliary_losses.contrastive import ContrastiveFlow
from lit_diffusion.auxiliary_losses.dispersive import Dispersive

__all__ = ["ContrastiveFlow", "Dispersive"]
