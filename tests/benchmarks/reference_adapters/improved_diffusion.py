"""improved-diffusion."""

from improved_diffusion import gaussian_diffusion, resample, respace, unet

from reference_adapters import openai_diffusion

COMPARISONS = openai_diffusion.of_improved(
    openai_diffusion.Library(gaussian_diffusion, respace, resample, unet)
)
