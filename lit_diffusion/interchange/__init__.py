"""Weights that leave for other programs, and that come from them."""

from lit_diffusion.interchange.exported import load_network

__all__ = ["load_network"]
