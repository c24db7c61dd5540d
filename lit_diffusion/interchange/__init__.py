"""Export and import of networks, to and from other libraries."""

from lit_diffusion.interchange.exported import load_network

__all__ = ["load_network"]
