"""Latents of a folder of images, written shard by shard: what `lit-diffusion encode` does."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from lit_diffusion.data.base import as_it_is, require_at_least
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.latents import INDEX, LatentIndex
from lit_diffusion.interchange.exported import folder_for
from lit_diffusion.modules.vae import VAECodec


def shared_place() -> tuple[int, int]:
    """Rank and number of the processes of torchrun or srun, which need not talk to each other.

    A job's script is one process, of however many tasks the job is.
    """
    names = [("RANK", "WORLD_SIZE")]
    names += [("SLURM_PROCID", "SLURM_NTASKS")] * ("SLURM_STEP_ID" in os.environ)
    found = [(os.environ[r], os.environ[n]) for r, n in names if {r, n} <= os.environ.keys()]
    rank, size = found[0] if found else ("0", "1")
    return int(rank), int(size)


def planned(
    images: ImageFolder, codec: VAECodec, out: Path, shard_size: int, flips: bool
) -> LatentIndex:
    """The index of `out`, written unless it is there; flips may be added to a finished one.

    Raises:
        ValueError: where `out` holds latents of something else; says of what.
    """
    require_at_least(1, shard_size=shard_size)
    codec.encoded_shape(images.image_shape)
    plan = LatentIndex(
        num=len(images.select("train").names),
        image_shape=images.image_shape,
        classes=images.class_names,
        shard_size=shard_size,
        vae=codec.folder.name,
        vae_sha256=codec.sha256,
        images=images.fingerprint("train"),
        flips=flips,
    )
    folder_for(out)
    if (out / INDEX).exists():
        there = LatentIndex.read(out)
        plan = replace(plan, flips=flips or there.flips, vae=there.vae)
        for name in ("images", "num", "image_shape", "classes", "shard_size", "vae_sha256"):
            if (old := getattr(there, name)) != (new := getattr(plan, name)):
                raise ValueError(
                    f"{out} holds latents whose {name} is {old!r:.200}, and this call's is "
                    f"{new!r:.200}; choose another --out."
                )
        if there == plan:
            return plan
    plan.write(out)
    return plan


def encode_shards(
    images: ImageFolder,
    codec: VAECodec,
    out: Path,
    index: LatentIndex,
    device: torch.device,
    place: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write this process's share of the shards that are missing; how many it wrote.

    A shard is a function of its images alone: who writes it, and after which others, is the same.
    """
    rank, size = place
    dataset, workers = images.load("train"), images.num_workers
    if workers is None:
        workers = max(1, images.default_workers() // size)
    absent = index.lacking(out)
    lacking = [shard for shard in index.shards()[rank::size] if shard in absent]
    for done, (name, part, flip) in enumerate(lacking, start=1):
        loader = DataLoader(
            Subset(dataset, part), codec.batch_size, collate_fn=as_it_is, num_workers=workers
        )
        found = []
        for pixels, labels, _ in loader:
            shown = (pixels.flip(-1) if flip else pixels).to(device)
            found.append((codec.moments(shown).cpu(), labels))
        moments, all_labels = (torch.cat(each) for each in zip(*found, strict=True))
        index.write_shard(out / name, moments, all_labels)
        say(f"{name} is written, {done} of {len(lacking)}.")
    return len(lacking)
