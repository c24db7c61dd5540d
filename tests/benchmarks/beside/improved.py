"""improved-diffusion."""

from improved_diffusion import gaussian_diffusion, resample, respace, unet

from beside import openai

COMPARISONS = openai.of_improved(openai.Library(gaussian_diffusion, respace, resample, unet))
