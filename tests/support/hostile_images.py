"""Images and data files that are broken or lie."""

import io
import itertools
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.hostile_case import CANARY, Case, change_config
from support.hostile_checkpoints import GADGETS, Call

EVALUATE = "evaluate --images images --reference images --extractor digits-cnn"
REFERENCE = "evaluate --images images --reference real.npz --extractor digits-cnn"
FIT = "fit --config folder.yaml --trainer.default_root_dir=runs/new"
ODD = Path("images/3.png")


def cases() -> Iterator[Case]:
    """All of them."""
    yield from pictures()
    yield from arrays()
    yield from cifar()
    yield from caches()
    yield from weights()
    yield from records()


def png(width: int, height: int, data: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG file that says what it is told to."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def bomb(side: int) -> bytes:
    """Black, side by side pixels, packed into little."""
    packer = zlib.compressobj(9)
    row = bytes(side + 1)
    return png(side, side, b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()]))


def _cut(share: float, file: Path = ODD) -> None:
    os.truncate(file, int(share * file.stat().st_size))


def _mode(mode: str, size: tuple[int, int] = (8, 8), ending: str = "png") -> None:
    ODD.unlink()
    Image.new(mode, size).save(ODD.with_suffix(f".{ending}"))


PICTURES: dict[str, Callable[[], Any]] = {
    "empty": lambda: ODD.write_bytes(b""),
    "text": lambda: ODD.write_text("no image"),
    "an EPS": lambda: Image.new("L", (8, 8)).save(ODD, format="EPS"),  # Pillow calls Ghostscript
    "html": lambda: ODD.write_text("<html><script>alert(1)</script></html>"),
    "a pickle": lambda: ODD.write_bytes(pickle.dumps(Call(os.system, f"touch ../{CANARY}"))),
    "a config": lambda: shutil.copy("small.yaml", ODD),
    "cut at 10%": lambda: _cut(0.1),
    "cut at 50%": lambda: _cut(0.5),
    "cut at 90%": lambda: _cut(0.9),
    "a JPEG named PNG, cut": lambda: (_mode("L", (64, 64), "jpg"), _cut(0.5, Path("images/3.jpg"))),
    "0x0": lambda: ODD.write_bytes(png(0, 0, zlib.compress(b""))),
    "0x8": lambda: ODD.write_bytes(png(0, 8, zlib.compress(bytes(8)))),
    "1x1": lambda: ODD.write_bytes(png(1, 1, zlib.compress(bytes(2)))),
    "huge header": lambda: ODD.write_bytes(png(2**31 - 1, 2**31 - 1, zlib.compress(bytes(99)))),
    "wide header": lambda: ODD.write_bytes(png(2**31 - 1, 1, zlib.compress(bytes(99)))),
    "wrong depth": lambda: ODD.write_bytes(png(8, 8, zlib.compress(bytes(72)), depth=5)),
    "wrong colour": lambda: ODD.write_bytes(png(8, 8, zlib.compress(bytes(72)), colour=7)),
    "too little data": lambda: ODD.write_bytes(png(8, 8, zlib.compress(bytes(9)))),
    "no zlib": lambda: ODD.write_bytes(png(8, 8, b"no zlib at all")),
    "a bomb": lambda: ODD.write_bytes(bomb(20_000)),
    "a smaller bomb": lambda: ODD.write_bytes(bomb(10_000)),
    "RGBA": lambda: _mode("RGBA"),
    "palette": lambda: _mode("P"),
    "bilevel": lambda: _mode("1"),
    "16 bit": lambda: _mode("I;16"),
    "CMYK": lambda: _mode("CMYK", ending="jpg"),
    "colour among grey": lambda: _mode("RGB"),
    "another size": lambda: _mode("L", (9, 8)),
    "a text bomb": lambda: ODD.write_bytes(_text_bomb()),
    "a folder": lambda: (ODD.unlink(), ODD.mkdir()),
    "a link to nothing": lambda: (ODD.unlink(), ODD.symlink_to("nothing")),
    "a link to itself": lambda: (ODD.unlink(), ODD.symlink_to(ODD.name)),
    "endless zeros": lambda: (ODD.unlink(), ODD.symlink_to("/dev/zero")),
    "a pipe": lambda: (ODD.unlink(), os.mkfifo(ODD)),
    "none at all": lambda: (shutil.rmtree("images"), Path("images").mkdir()),
    "no folder": lambda: shutil.rmtree("images"),
    "a file for the folder": lambda: (shutil.rmtree("images"), Path("images").write_text("x")),
    "a circle of folders": lambda: Path("images/again").symlink_to(".."),
}
# Pillow fills in what is lacking at the end of a PNG; ImageFolder makes crops of any size.
HARMLESS = {
    ("a folder", "evaluate"),
    ("a circle of folders", "evaluate"),
    *itertools.product(("cut at 90%", "too little data"), ("evaluate", "fit")),
    *itertools.product(("a smaller bomb", "another size"), ("fit",)),
}


def _text_bomb() -> bytes:
    """A comment of 200 MB in a small file."""
    good = png(8, 8, zlib.compress(bytes(72)))
    content = b"comment\0\0" + zlib.compress(bytes(2 * 10**8), 9)
    check = struct.pack(">I", zlib.crc32(b"zTXt" + content))
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content + check
    return good[:33] + chunk + good[33:]


def folder_config(config: dict) -> None:
    """Train on the folder of images."""
    args = {"train": "images", "val": "images", "image_size": 8, "channels": 1, "batch_size": 4}
    config["data"] = {
        "class_path": "lit_diffusion.data.image_folder.ImageFolder",
        "init_args": {**args, "num_workers": 0, "cache_dir": "cache"},
    }
    model = config["model"]["init_args"]
    model["num_classes"] = model["network"]["init_args"]["num_classes"] = None
    model["label_dropout"] = 0.0
    config["trainer"]["callbacks"] = []
    config["trainer"]["max_steps"] = 1


def pictures() -> Iterator[Case]:
    for (name, make), command in itertools.product(PICTURES.items(), (EVALUATE, FIT)):

        def spoil(rng: random.Random, make: Callable[[], Any] = make) -> None:
            write_folder_config()
            make()

        word = command.split()[0]
        yield Case(
            "images: broken or odd pictures",
            f"picture-{name}-{word}",
            spoil,
            command,
            r"3\.png|3\.jpg|images",
            harmless=(lambda: True) if (name, word) in HARMLESS else None,
        )
    for i in range(24):

        def flip(rng: random.Random) -> None:
            write_folder_config()
            data = bytearray(ODD.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            ODD.write_bytes(data)

        command = (EVALUATE, FIT)[i % 2]
        # Pillow lets some bits of a PNG differ.
        label = f"picture-flipped-{i}"
        yield Case("images: a flipped bit", label, flip, command, r"3\.png", harmless=lambda: True)


def write_folder_config() -> None:
    shutil.copy("small.yaml", "folder.yaml")
    change_config(folder_config, Path("folder.yaml"))


def _npz(path: Path, **arrays: Any) -> None:
    np.savez(path, **arrays)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _lying_npz(header: str, data: bytes = bytes(64)) -> None:
    """An .npy whose header says something else than its data."""
    text = header.encode() + b" " * (117 - len(header)) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data
    with zipfile.ZipFile("real.npz", "w") as file:
        file.writestr("arr_0.npy", member)


def _shape(shape: str, dtype: str = "|u1") -> Callable[[], None]:
    return lambda: _lying_npz(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}")


GREY = np.zeros((8, 8, 8, 1), np.uint8)
REAL = Path("real.npz")
ARRAYS: dict[str, Callable[[], Any]] = {
    "empty": lambda: REAL.write_bytes(b""),
    "text": lambda: REAL.write_text("arr_0"),
    "an npy": lambda: REAL.write_bytes(_npy(GREY)),
    "a pickle": lambda: REAL.write_bytes(pickle.dumps(Call(os.system, f"touch ../{CANARY}"))),
    "objects": lambda: _npz(REAL, arr_0=np.array([Call(os.system, f"touch ../{CANARY}")])),
    "no arr_0": lambda: _npz(REAL, images=GREY),
    "floats": lambda: _npz(REAL, arr_0=GREY.astype(np.float32)),
    "two dimensions": lambda: _npz(REAL, arr_0=GREY[..., 0, 0]),
    "no images": lambda: _npz(REAL, arr_0=GREY[:0]),
    "one image": lambda: _npz(REAL, arr_0=GREY[:1]),
    "no pixels": lambda: _npz(REAL, arr_0=GREY[:, :0]),
    "five channels": lambda: _npz(REAL, arr_0=np.zeros((8, 8, 8, 5), np.uint8)),
    "colour": lambda: _npz(REAL, arr_0=np.random.default_rng(0).integers(0, 9, (8, 8, 8, 3), "u1")),
    "another size": lambda: _npz(REAL, arr_0=np.zeros((8, 1, 1, 1), np.uint8)),
    "cut": lambda: (_npz(REAL, arr_0=GREY), _cut(0.6, REAL)),
    "10^12 images": _shape("(10**12, 8, 8, 1)".replace("10**12", str(10**12))),
    "negative": _shape("(-8, 8, 8, 1)"),
    "a shape of text": _shape("('a', 8, 8, 1)"),
    "code for a header": lambda: _lying_npz(f"__import__('os').system('touch ../{CANARY}')"),
    "a dtype of objects": _shape("(8, 8, 8, 1)", "|O"),
    "too little data": _shape("(8, 8, 8, 1)"),
    "a folder": REAL.mkdir,
    "a link to itself": lambda: REAL.symlink_to(REAL.name),
    "a pipe": lambda: os.mkfifo(REAL),
    "not there": lambda: None,
}


def arrays() -> Iterator[Case]:
    for name, make in ARRAYS.items():
        yield Case(
            "images: a broken .npz",
            f"npz-{name}",
            lambda rng, make=make: make(),
            REFERENCE,
            r"real\.npz|scores need 4|extractor",
        )
    for i in range(16):

        def flip(rng: random.Random) -> None:
            _npz(REAL, arr_0=np.random.default_rng(0).integers(0, 99, GREY.shape, "u1"))
            data = bytearray(REAL.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            REAL.write_bytes(data)

        yield Case(
            "images: a flipped bit",
            f"npz-flipped-{i}",
            flip,
            REFERENCE,
            r"real\.npz",
            harmless=lambda: True,  # names, dates and padding of a zip may differ
        )


def cifar() -> Iterator[Case]:
    """Pickles in the place of CIFAR-10's, which is only opened if it is the published file."""

    def config(config: dict) -> None:
        config["data"] = {
            "class_path": "lit_diffusion.data.cifar10.CIFAR10",
            "init_args": {"root": "data", "batch_size": 4},
        }
        config["model"]["init_args"]["image_shape"] = [3, 32, 32]
        network = config["model"]["init_args"]["network"]["init_args"]
        network["in_channels"] = network["out_channels"] = 3

    folder = Path("data/cifar-10-batches-py")
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    for i, gadget in enumerate(("os.system", "eval", "exec", "__import__", "runpy", "os.remove")):

        def spoil(rng: random.Random, gadget: str = gadget, i: int = i) -> None:
            change_config(config)
            folder.mkdir(parents=True)
            for name in names:
                (folder / name).write_bytes(pickle.dumps({"data": GADGETS[gadget]()}, 2))
            if i % 2:
                # A file of that name is what would be unpacked; the network is not asked for it.
                Path("data/cifar-10-python.tar.gz").write_bytes(rng.randbytes(1000))

        yield Case(
            "data: malicious pickles as CIFAR-10",
            f"cifar-{gadget}",
            spoil,
            FIT.replace("folder.yaml", "small.yaml"),
            "CIFAR-10",
            offline=True,
        )


def caches() -> Iterator[Case]:
    """Statistics of real images that were remembered, and are read back."""
    makers = {
        "empty": lambda path: path.write_bytes(b""),
        "text": lambda path: path.write_text("x"),
        "objects": lambda path: _npz(path, floors=np.array([Call(os.system, "true")])),
        "nothing in it": lambda path: _npz(path),
        "other shapes": lambda path: _npz(
            path, floors=np.ones(3), floor_matched=np.ones(2), real_features_sum=np.ones(2)
        ),
        "text for numbers": lambda path: _npz(path, floors=np.array(["a"]), floor_matched=1),
        "cut": lambda path: _cut(0.5, path),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
    }
    for name, make in makers.items():

        def spoil(rng: random.Random, make: Callable[[Path], Any] = make) -> None:
            from lit_diffusion.cli.main import main

            assert main(EVALUATE.split()) == 0
            (path,) = Path("cache/lit-diffusion").glob("digits-cnn-*.npz")
            make(path)

        label = f"cache-{name}"
        yield Case("data: broken statistics in the cache", label, spoil, EVALUATE, r"\.npz")


def weights() -> Iterator[Case]:
    """Weights of Inception in torch's cache."""
    file = Path("hub/hub/checkpoints/weights-inception-2015-12-05-6726825d.pth")
    makers: dict[str, Callable[[], Any]] = {
        "not there": lambda: None,
        "empty": lambda: file.write_bytes(b""),
        "text": lambda: file.write_text("x"),
        "a pickle": lambda: file.write_bytes(pickle.dumps(Call(os.system, f"touch ../{CANARY}"))),
        "a folder": lambda: file.mkdir(),
        "random": lambda: file.write_bytes(random.Random(0).randbytes(10**6)),
    }
    for name, make in makers.items():

        def spoil(rng: random.Random, make: Callable[[], Any] = make) -> None:
            file.parent.mkdir(parents=True)
            make()

        command = "evaluate --images images --reference images"
        yield Case("data: broken extractor weights", f"weights-{name}", spoil, command, "inception")


def records() -> Iterator[Case]:
    """What is said beside samples of how they were made."""
    for name, text in {
        "text": "no json",
        "a list": "[1, 2]",
        "empty": "",
        "deep": "[" * 10**5,
        "a number": "9" * 10**5,
        "binary": "\x00\x01",
    }.items():
        yield Case(
            "data: a broken samples.json",
            f"samples-{name}",
            lambda rng, text=text: Path("images/samples.json").write_text(text),
            EVALUATE,
            r"samples\.json",
        )
