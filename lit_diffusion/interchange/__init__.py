"""Weights of networks to and from other programs."""

from lit_diffusion.interchange.exported import load_network

__all__ = ["load_network"]
