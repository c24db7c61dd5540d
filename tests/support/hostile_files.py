"""Images, data and files of runs that are broken or lie."""

import itertools
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lit_diffusion.cli.main import main
from lit_diffusion.cli.run_folder import CLAIM
from support.experiments import write_arm
from support.hostile import (
    CANARY,
    EVALUATE,
    LAST,
    RESUME,
    RUN,
    SAMPLE,
    TOUCH,
    VALIDATE,
    Call,
    Case,
    change_config,
    cut,
    flip,
    no_files,
)
from support.tiny_run import spec

IMAGES = "evaluate --images images --reference images --extractor digits-cnn"
REFERENCE = "evaluate --images images --reference real.npz --extractor digits-cnn"
FOLDER = "fit --config folder.yaml --trainer.default_root_dir=runs/new"
COMPARE = "compare runs/arms --out report"
SWEEP = "sweep small.yaml --seeds 0 --out runs/sweep"
ODD, JPEG, REAL = Path("images/3.png"), Path("images/3.jpg"), Path("real.npz")
ARM, SWEPT = Path("runs/arms/quick/seed-1"), Path("runs/sweep/baseline/seed-0")
EVIL = pickle.dumps(Call(os.system, TOUCH))


def cases() -> Iterator[Case]:
    """All but those that are drawn."""
    for name, make in ARRAYS.items():
        yield Case(f"npz-{name}", make, REFERENCE, r"real\.npz|scores need at least 4|extractor")
    for part in (pictures, data, records, run_files):
        yield from part()


# Images


def picture(mode: str, size: tuple[int, int] = (8, 8), path: Path = ODD, **options: Any) -> None:
    ODD.unlink()
    Image.new(mode, size).save(path, **options)


def text_bomb() -> None:
    """A comment of 200 MB in a small file."""
    comment = PngInfo()
    comment.add_text("comment", "a" * 2 * 10**8, zip=True)
    picture("L", pnginfo=comment)


def huge_header() -> None:
    """A small file whose header has the largest size that there is, and the right checksum."""
    data = bytearray(ODD.read_bytes())
    data[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    ODD.write_bytes(data)


PICTURES: dict[str, Callable[[], Any]] = {
    "empty": lambda: ODD.write_bytes(b""),
    "an EPS": lambda: Image.new("L", (8, 8)).save(ODD, format="EPS"),  # Pillow calls Ghostscript
    "cut at 50%": lambda: cut(ODD, 0.5),
    "a JPEG, cut": lambda: (picture("L", (64, 64), JPEG), cut(JPEG, 0.5)),
    "1x1": lambda: picture("L", (1, 1)),
    "huge header": huge_header,
    "a bomb": lambda: picture("1", (20_000, 20_000)),
    "a text bomb": text_bomb,
    "colour among grey": lambda: picture("RGB"),
    "no folder": lambda: shutil.rmtree("images"),
    "a file for the folder": lambda: (shutil.rmtree("images"), Path("images").write_text("x")),
    **no_files(ODD),
}


def folder_config(config: dict) -> None:
    """Train on the folder of images."""
    args = {"train": "images", "val": "images", "image_size": 8, "channels": 1, "batch_size": 4}
    args |= {"num_workers": 0, "cache_dir": "cache"}
    config["data"] = spec("lit_diffusion.data.image_folder.ImageFolder", **args)
    model = config["model"]["init_args"]
    model["num_classes"] = model["network"]["init_args"]["num_classes"] = None
    model["label_dropout"] = 0.0
    config["trainer"] |= {"callbacks": [], "max_steps": 1}


def write_folder_config() -> None:
    shutil.copy("small.yaml", "folder.yaml")
    change_config(folder_config, Path("folder.yaml"))


def pictures() -> Iterator[Case]:
    def spoil(make: Callable[[], Any]) -> None:
        write_folder_config()
        make()

    for (name, make), command in zip(PICTURES.items(), itertools.cycle((IMAGES, FOLDER))):
        command = FOLDER if name == "a folder" else command  # evaluate takes the other pictures
        yield Case(f"picture-{name}", partial(spoil, make), command, r"3\.png|3\.jpg|images")


def flipped(rng: random.Random) -> Case:
    """A bit of a picture or of an array; Pillow lets some differ, and names in a zip may."""

    def spoil() -> None:
        write_folder_config()
        np.savez(REAL, arr_0=np.random.default_rng(0).integers(0, 99, GREY.shape, "u1"))
        flip(REAL if command == REFERENCE else ODD, rng)

    command = rng.choice((IMAGES, FOLDER, REFERENCE))
    return Case("image-flipped", spoil, command, r"3\.png|real\.npz", harmless=True)


def npz(array: Any, name: str = "arr_0") -> Callable[[], Any]:
    return lambda: np.savez(REAL, **{name: array})


def lying(header: str) -> Callable[[], None]:
    """An .npy whose header does not fit its data."""
    text = header.encode() + b" " * (117 - len(header)) + b"\n"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64)

    def spoil() -> None:
        with zipfile.ZipFile(REAL, "w") as file:
            file.writestr("arr_0.npy", member)

    return spoil


GREY = np.zeros((8, 8, 8, 1), np.uint8)
ARRAYS: dict[str, Callable[[], Any]] = {
    "an npy": lambda: (np.save("real.npy", GREY), os.replace("real.npy", REAL)),
    "a pickle": lambda: REAL.write_bytes(EVIL),
    "objects": npz(np.array([Call(os.system, TOUCH)])),
    "no arr_0": npz(GREY, "images"),
    "cut": lambda: (np.savez(REAL, arr_0=GREY), cut(REAL, 0.6)),
    "10^12 images": lying(
        f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({10**12}, 8, 8, 1)}}"
    ),
    "code for a header": lying(f"__import__('os').system('touch ../{CANARY}')"),
    "not there": lambda: None,
    **{name: spoil for name, spoil in no_files(REAL).items() if "nothing" not in name},
}


# Other data


CACHED: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("x"),
    "objects": lambda path: np.savez(path, floors=np.array([Call(os.system, "true")])),
    "other shapes": lambda path: np.savez(
        path, floors=np.ones(3), floor_matched=np.ones(2), real_features_sum=np.ones(2)
    ),
    "cut": lambda path: cut(path, 0.5),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
NOTES = {"a list": "[1, 2]", "deep": "[" * 10**5, "binary": "\x00\x01"}


def data() -> Iterator[Case]:
    def in_cache(make: Callable[[Path], Any]) -> None:
        assert main(IMAGES.split()) == 0
        (path,) = Path("cache/lit-diffusion").glob("digits-cnn-*.npz")
        make(path)

    for name, make in CACHED.items():
        yield Case(f"cache-{name}", partial(in_cache, make), IMAGES, r"\.npz")
    for name, text in NOTES.items():
        spoil = partial(Path("images/samples.json").write_text, text)
        yield Case(f"samples-{name}", spoil, IMAGES, r"samples\.json")


# Files of runs


def write_arms() -> None:
    write_arm(Path("runs/arms/baseline"), 1.0, range(2))
    write_arm(Path("runs/arms/quick"), 2.0, range(2))


def write_sweep() -> None:
    """The healthy run as one of a sweep."""
    shutil.copytree(RUN, SWEPT)
    change_config(lambda config: config.update(seed_everything=0), SWEPT / "config.yaml")
    root = {"default_root_dir": str(SWEPT)}
    change_config(lambda config: config["trainer"].update(root), SWEPT / "config.yaml")


def rewriting(file: Path, change: Callable[[str], str | bytes]) -> Callable[[], None]:
    """Change the text of a file of a run."""

    def spoil() -> None:
        if ARM in file.parents:
            write_arms()
        if SWEPT in file.parents:
            write_sweep()
        changed = change(file.read_text())
        file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())

    return spoil


def line(**changes: Any) -> Callable[[str], str]:
    """A further evaluation, the last one with something else in it."""
    return lambda text: text + json.dumps(json.loads(text.splitlines()[-1]) | changes) + "\n"


def cell(column: str, value: str) -> Callable[[str], str]:
    """Another value in the last row."""

    def change(text: str) -> str:
        header, *rows = text.splitlines()
        cells = rows[-1].split(",")
        cells[header.split(",").index(column)] = value
        return "\n".join([header, *rows[:-1], ",".join(cells), ""])

    return change


LINES: dict[str, Callable[[str], str | bytes]] = {
    "no JSON": lambda text: text + "no json\n",
    "a list": lambda text: text + "[1, 2]\n",
    "deep": lambda text: text + "[" * 10**5 + "\n",
    "a huge number": lambda text: text + '{"metric": "val/fid_16", "step": ' + "9" * 5000 + "}\n",
    "step is text": line(step="four"),
    "step is nan": line(step=float("nan")),
    "value is text": line(value="good"),
    "seeds is empty": line(seeds=[]),
    "HTML": line(metric="<script>alert(1)</script>fid", protocol="<img src=x onerror=alert(1)>"),
}
ROWS: dict[str, Callable[[str], str | bytes]] = {
    "no header": lambda text: text.partition("\n")[2],
    "NULs": lambda text: text + "\x00" * 10 + "\n",
    "step is text": cell("step", "four"),
    "step is huge": cell("step", "9" * 5000),
    "too many cells": lambda text: text + ",".join("1" * 40) + "\n",
    "step twice": lambda text: text.replace("step,", "step,step,", 1),
    "empty": lambda text: "",
}
CONFIGS: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "python": lambda text: f'{text}\nmore: !!python/object/apply:os.system ["{TOUCH}"]\n',
    "os.system": lambda text: text.replace("lit_diffusion.networks.unet.UNet", "os.system"),
    "stranger": lambda text: text.replace("lit_diffusion.data.digits.Digits", "stranger.Net"),
    "deep": lambda text: "a: " + "[" * 99_000,
}
READ = (  # file, how it may be spoilt, commands that read it, what the message names
    (
        "evaluations.jsonl",
        LINES,
        {COMPARE: ARM, RESUME: RUN, EVALUATE: RUN, SWEEP: SWEPT},
        r"evaluations\.jsonl|FID protocol|seed-1",
    ),
    ("metrics.csv", ROWS, {COMPARE: ARM, RESUME: RUN, SWEEP: SWEPT}, r"metrics\.csv"),
    (
        "config.yaml",
        CONFIGS,
        {VALIDATE: RUN, COMPARE: ARM, SWEEP: SWEPT},
        r"config\.yaml|small\.yaml|model|data|max_steps|network|seed-1|seed-0",
    ),
)


def records() -> Iterator[Case]:
    """Each at two commands: which fields matter depends on those, so that all may be harmless."""
    for name, changes, commands, pattern in READ:
        turns = itertools.cycle(commands.items())
        for label, change in changes.items():
            for command, folder in itertools.islice(turns, 2):
                case = f"{name}-{label}-{command.split()[0]}"
                spoil = rewriting(folder / name, change)
                yield Case(case, spoil, command, pattern, harmless=True)


def follows_no_link() -> bool:
    """Whether a save has replaced what was planted, and left alone what that points to."""
    return "class_path" in Path("small.yaml").read_text() and not LAST.is_symlink()


def run_files() -> Iterator[Case]:
    """Folders, links and pipes where a run has files."""
    commands = {"evaluations.jsonl": RESUME, "metrics.csv": RESUME, "config.yaml": VALIDATE}
    for name, command in commands.items():
        for label, spoil in no_files(RUN / name).items():
            pattern = rf"{name.replace('.', '[.]')}|--config|add the config of the run"
            fine = label == "a link to nothing"
            yield Case(f"run-{name}-{label}", spoil, command, pattern, harmless=fine)
    for label, spoil in no_files(RUN / CLAIM).items():
        if label != "endless zeros":  # the guard takes a link to them for them
            fine = label == "a pipe"  # which can be locked like a file
            yield Case(f"run-lock-{label}", spoil, RESUME, r"\.lock", harmless=fine)
    # What the last save writes; with split weights it is a folder.
    part = LAST.with_name("..last.ckpt.end.part")
    planted = no_files(part) | {"a link": lambda: part.symlink_to("../../../small.yaml")}
    del planted["endless zeros"]
    written = ("config.resume-1.yaml", "metrics.csv", "before-last.ckpt", "evaluations.jsonl")
    fine = follows_no_link
    for label, spoil in planted.items():
        pattern = r"last\.ckpt could not be written"
        yield Case(f"run-part-{label}", spoil, RESUME, pattern, harmless=fine, writes=written)
    for command in (SAMPLE, COMPARE.replace("runs/arms", "nowhere"), EVALUATE):
        away = lambda: shutil.rmtree("runs")  # noqa: E731
        yield Case(f"no-run-{command.split()[0]}", away, command, "runs/small|nowhere")
