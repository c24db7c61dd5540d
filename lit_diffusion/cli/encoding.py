"""Write the latents of a folder of images, shard by shard."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from lit_diffusion.data.base import identity_collate, require_at_least
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.latents import INDEX, MAX_SHARDS, LatentIndex
from lit_diffusion.interchange.exported import create_folder
from lit_diffusion.modules.vae import VAECodec
from lit_diffusion.signals import print_error


def launcher_rank_and_world_size() -> tuple[int, int]:
    """Return the rank and world size from the environment variables of torchrun or srun.

    In SLURM, only srun starts several processes. A batch script, and the shell that salloc starts,
    count as one process, even if the job has several tasks.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Not SLURM_NTASKS, which in the shell of salloc is the number of tasks of the whole job.
    if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= os.environ.keys():
        return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    return 0, 1


def plan_shards(
    images: ImageFolder, codec: VAECodec, folder: Path, shard_size: int, flips: bool
) -> LatentIndex:
    """Write the index of a folder of latents, or check that the existing index fits.

    If `flips` is set, but the existing index has no flips, flips are added to the index. Latents
    from other images, from another VAE or with another `shard_size` raise a ValueError.
    """
    num = len(images.select("train").names)
    require_at_least(-(-num // MAX_SHARDS), shard_size=shard_size)
    codec.encoded_shape(images.image_shape)
    index = LatentIndex(
        num=num,
        image_shape=images.image_shape,
        classes=images.class_names,
        shard_size=shard_size,
        vae=codec.folder.name,
        vae_sha256=codec.sha256,
        images=images.fingerprint("train"),
        flips=flips,
    )
    create_folder(folder)
    if (folder / INDEX).exists():
        old_index = LatentIndex.read(folder)
        index = replace(index, flips=flips or old_index.flips, vae=old_index.vae)
        for name in ("images", "num", "image_shape", "classes", "shard_size", "vae_sha256"):
            if (old := getattr(old_index, name)) != (new := getattr(index, name)):
                raise ValueError(
                    f"{folder} has latents with {name} {old!r:.200}, but this command has "
                    f"{new!r:.200}; choose another --out."
                )
        if old_index == index:
            return index
    index.write(folder)
    return index


def encode_shards(
    images: ImageFolder,
    codec: VAECodec,
    folder: Path,
    index: LatentIndex,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> int:
    """Write this process's share of a folder's missing shards, and return how many were written.

    A shard depends only on its images, not on the process that writes it.
    """
    dataset, num_workers = images.load("train"), images.num_workers
    if num_workers is None:
        num_workers = max(1, images.default_workers() // world_size)
    lacking = index.missing_shards(folder)
    shards = [shard for shard in index.shards()[rank::world_size] if shard in lacking]
    for number, (name, part, flip) in enumerate(shards, start=1):
        loader = DataLoader(
            Subset(dataset, part),
            codec.batch_size,
            collate_fn=identity_collate,
            num_workers=num_workers,
        )
        batches = []
        for pixels, labels, _ in loader:
            pixels = (pixels.flip(-1) if flip else pixels).to(device)
            batches.append((codec.moments(pixels).cpu(), labels))
        moments, all_labels = (torch.cat(each) for each in zip(*batches, strict=True))
        index.write_shard(folder / name, moments, all_labels)
        print_error(f"{name} is written, {number} of {len(shards)}.")
    return len(shards)
