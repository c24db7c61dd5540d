"""improved-diffusion."""

from improved_diffusion import gaussian_diffusion, resample, respace, unet

from reference_adapters import openai_diffusion

LIBRARY = openai_diffusion.Library(gaussian_diffusion, respace, resample, unet)
COMPARISONS = openai_diffusion.comparisons_of(LIBRARY, openai_diffusion.IMPROVED)
