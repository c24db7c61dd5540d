"""Files in MNIST's format, with random pictures."""

import struct

import torch


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 28, 28), generator=generator).to(torch.uint8)
    return images, torch.arange(count) % 10


def write(folder, train, val, name="MNIST"):
    """So many pictures of a split: `digits(count, seed=count)`."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in {"train": train, "t10k": val}.items():
        images, labels = digits(count, seed=count)
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.numpy().tobytes())
        head = struct.pack(">II", 0x801, count)
        tail = labels.to(torch.uint8).numpy().tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + tail)
