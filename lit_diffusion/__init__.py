"""lit-diffusion: PyTorch Lightning modules and callbacks for training diffusion models."""

__version__ = "0.1.0"
