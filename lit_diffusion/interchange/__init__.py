"""Export networks to other libraries, and import networks from them."""

from lit_diffusion.interchange.exported import load_network

__all__ = ["load_network"]
