"""A small AutoencoderKL, and folders of images and of the latents that it gives."""

import hashlib

import torch

from lit_diffusion.data.latents import LatentIndex

SCALE = 0.5


def build(channels=(16, 32), image_channels=3):
    """Freshly initialised, the same every time: 3x32x32 images have latents 4x16x16."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoencoderKL(
            in_channels=image_channels,
            out_channels=image_channels,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            norm_num_groups=8,
            latent_channels=4,
            mid_block_add_attention=False,
        )


def save(folder, **changes):
    """A folder with one that was not trained."""
    build(**changes).save_pretrained(folder)
    return folder


def write_latents(folder, vae, side, num=4, factor=8):
    """Random moments of so many images, two a shard, as if that VAE had encoded them."""
    folder.mkdir(parents=True)
    digest = hashlib.sha256((vae / "diffusion_pytorch_model.safetensors").read_bytes()).hexdigest()
    shape, classes = (3, side, side), ("cat", "dog")
    index = LatentIndex(num, shape, classes, 2, vae.name, digest, "f" * 16, flips=True)
    index.write(folder)
    for name, part, _ in index.shards():
        moments = torch.randn(len(part), 8, side // factor, side // factor)
        index.write_shard(folder / name, moments, torch.tensor(part) % 2)
