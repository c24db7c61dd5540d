"""Further terms of the training loss, most of them on the features of a block of the network."""

from lit_diffusion.auxiliary_losses.dispersive import Dispersive

__all__ = ["Dispersive"]
