"""Checkpoint files: written atomically, and read without running any code."""

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO

__all__ = ["AtomicCheckpointIO", "load"]
