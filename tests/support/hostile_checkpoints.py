"""Checkpoints that are cut, damaged, forged or malicious."""

import builtins
import functools
import itertools
import operator
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lit_diffusion.checkpoints.reading import read_checkpoint
from support.hostile import (
    CANARY,
    LAST,
    RESUME,
    SAMPLE,
    TOUCH,
    VALIDATE,
    WRITE,
    Call,
    Case,
    cut,
    flip,
    no_files,
)
from support.plain_module import assert_same_bits
from support.tiny_run import spec

RAW = f"{SAMPLE} --weights raw"
ALONE = f"evaluate --checkpoint {LAST} --num 8"
COMMANDS = (SAMPLE, RESUME, VALIDATE, RAW)
NAMED = r"last\.ckpt"

Content = dict[str, Any]


def cases() -> Iterator[Case]:
    """All but those that are drawn."""
    for part in (replaced, misfits, parts, sizes, code, class_paths):
        yield from part()


# Damage


def replaced() -> Iterator[Case]:
    """Something else in the place of the file, or a part of it."""
    wrong = {
        "empty": lambda: cut(LAST, 0),
        "half": lambda: cut(LAST, 0.5),
        "without its end": lambda: os.truncate(LAST, LAST.stat().st_size - 22),
        "random bytes": lambda: LAST.write_bytes(random.Random(0).randbytes(10**5)),
    }
    spoils = wrong | no_files(LAST)
    for (name, spoil), command in zip(spoils.items(), itertools.cycle(COMMANDS)):
        yield Case(f"checkpoint-{name}", spoil, command, NAMED)


def flipped(rng: random.Random) -> Case:
    """A bit of a header, of the pickle, of a tensor, of the directory or anywhere."""

    def spoil() -> None:
        shutil.copy(LAST, "sound.ckpt")
        size = LAST.stat().st_size
        with zipfile.ZipFile(LAST) as file:
            entries, directory = file.infolist(), file.start_dir
        pickled = next(entry for entry in entries if entry.filename.endswith("data.pkl"))
        tensor = rng.choice([entry for entry in entries if "/data/" in entry.filename])
        places = [(0, size), (size - 98, size), (directory, size)]
        for start, length in ((e.header_offset, e.file_size) for e in (pickled, tensor)):
            places.append((start, start + 30 + length))
        flip(LAST, rng, *rng.choice(places))
        shutil.copy(LAST, "spoilt.ckpt")  # a resume that meets no harm writes another

    def holds_the_same() -> bool:
        contents = (read_checkpoint(Path(f"{name}.ckpt")) for name in ("spoilt", "sound"))
        assert_same_bits(*contents)
        return True

    command = rng.choice((SAMPLE, RAW, RESUME))
    return Case("checkpoint-flipped", spoil, command, NAMED, harmless=holds_the_same)


# Forged content


def edit(change: Callable[[Content], Any]) -> Callable[[], None]:
    """Change what the checkpoint holds; the file is as torch.save writes it."""

    def spoil() -> None:
        content = torch.load(LAST, weights_only=True)
        change(content)
        torch.save(content, LAST)

    return spoil


def first_weight(content: Content) -> str:
    return next(name for name, value in content["state_dict"].items() if value.dim() == 4)


def replace_weight(make: Callable[[torch.Tensor], Any], raw: bool = True, averaged: bool = True):
    """Put something in the place of the first weight, of the module or of its averages."""

    def change(content: Content) -> None:
        name = first_weight(content)
        value = make(content["state_dict"][name])
        if raw:
            content["state_dict"][name] = value
        for key, state in content["callbacks"].items():
            if key.startswith("EMA{") and averaged:
                for shadow in state["shadows"]:
                    shadow[name] = value

    return change


FORGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda w: w.transpose(0, 1),
    "wider": lambda w: torch.cat([w, w]),
    "a huge view of one number": lambda w: torch.zeros(()).expand(10**6, 10**6),
    "int64": lambda w: w.long(),
    "sparse": lambda w: w.to_sparse(),
    "meta": lambda w: w.to("meta"),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    "nested": lambda w: torch.nested.nested_tensor([w.flatten(), w.flatten()[:3]]),
    "text": lambda w: "weight",
    "numpy": lambda w: w.numpy(),
}
NAMES: dict[str, Callable[[dict, str], Any]] = {
    "missing": lambda state, name: state.pop(name),
    "extra": lambda state, name: state.update(more=torch.zeros(2)),
    "renamed": lambda state, name: state.update({"module." + name: state.pop(name)}),
    "number for a name": lambda state, name: state.update({7: state.pop(name)}),
}


def misfits() -> Iterator[Case]:
    for (name, make), command in zip(FORGED.items(), itertools.cycle(COMMANDS)):
        yield Case(f"weight-{name}", edit(replace_weight(make)), command, NAMED)
    # Averages that are sound take the place of weights that are not.
    raw, averaged = (edit(replace_weight(FORGED["wider"], a, not a)) for a in (True, False))
    for command in (RAW, RESUME, VALIDATE):
        yield Case(f"raw-weight-{command.split()[0]}", raw, command, NAMED)
    for command in (SAMPLE, RESUME):
        pattern = f"{NAMED}|The checkpoint's average"
        yield Case(f"averaged-weight-{command.split()[0]}", averaged, command, pattern)
    for (name, change), command in zip(NAMES.items(), itertools.cycle((RAW, RESUME, VALIDATE))):
        spoil = edit(lambda content, c=change: c(content["state_dict"], first_weight(content)))
        yield Case(f"names-{name}", spoil, command, NAMED)


KEYS = {
    "state_dict": VALIDATE,
    "callbacks": SAMPLE,
    "hyper_parameters": SAMPLE,
    "datamodule_hyper_parameters": ALONE,
    "global_step": SAMPLE,
    "epoch": RESUME,
    "loops": RESUME,
    "optimizer_states": RESUME,
    "lr_schedulers": RESUME,
    "pytorch-lightning_version": RESUME,
}
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "negative": lambda: -1,
    "nan": lambda: float("nan"),
    "a dict": lambda: {"a": {"b": [1]}},
    "numbers for names": lambda: {1: 2, None: 3},
    "a tensor": lambda: torch.zeros(3),
}


def parts() -> Iterator[Case]:
    """Each part of a checkpoint is missing, or one of two other things."""
    pattern = f"{NAMED}|holds no averages"
    may_lack = {"hyper_parameters", "pytorch-lightning_version", "datamodule_hyper_parameters"}
    wrong = itertools.cycle(WRONG)
    for key, command in [*KEYS.items(), *KEYS.items()]:
        name = next(wrong)
        spoil = edit(lambda content, key=key, name=name: content.update({key: WRONG[name]()}))
        # {"a": ...} is what a module written in Python, or another callback, leaves.
        fine = name == "a dict" and key in ("hyper_parameters", "callbacks")
        fine |= key == "datamodule_hyper_parameters"  # evaluate asks the run's config
        yield Case(f"{key}-is-{name}", spoil, command, pattern, harmless=fine)
    for key, command in KEYS.items():
        spoil = edit(lambda content, key=key: content.pop(key))
        fine = key in may_lack or command != RESUME
        yield Case(f"lacks-{key}", spoil, command, pattern, harmless=fine, codes=(1, 2))


def deep(rng: random.Random) -> Case:
    """Something deep inside of what a resume restores."""
    names = ("callbacks", "loops", "optimizer_states", "lr_schedulers", "hyper_parameters")
    part = rng.choice(names)

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(value, dict | list):
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                yield value, key
                yield from places(value[key])

    def change(content: Content) -> None:
        holder, key = rng.choice(list(places(content[part])))
        holder[key] = WRONG[rng.choice(list(WRONG))]()

    command = rng.choice((RESUME, SAMPLE if part == "callbacks" else VALIDATE))
    pattern = r"last\.ckpt|model\.|not finite|The checkpoint's average"
    free = {"harmless": True, "codes": (1, 2), "writes": WRITTEN}
    return Case(f"deep-in-{part}", edit(change), command, pattern, **free)


WRITTEN = ("config.resume-1.yaml", "metrics.csv", "non-finite-rank0.ckpt")


# Absurd sizes


def rebuilt(name: str, *args: Any) -> Callable[[torch.Tensor], Call]:
    return lambda w: Call(getattr(torch._utils, name), *(a(w) if callable(a) else a for a in args))


def _storage(weight: torch.Tensor) -> Any:
    return torch.storage.TypedStorage(
        wrap_storage=weight.untyped_storage(), dtype=weight.dtype, _internal=True
    )


HOOKS = OrderedDict()
REBUILT = "_rebuild_tensor_v2", _storage
LYING = {
    "10^12 elements": rebuilt(*REBUILT, 0, (10**12,), (1,), False, HOOKS),
    "an offset": rebuilt(*REBUILT, 10**9, (4,), (1,), False, HOOKS),
    "sparse": rebuilt(
        "_rebuild_sparse_tensor",
        torch.sparse_coo,
        (torch.full((1, 2), 10**9), torch.ones(2), (4,), False),
    ),
    "meta": rebuilt("_rebuild_meta_tensor_no_storage", torch.float32, (10**12,), (1,), False),
    "parameter of text": rebuilt("_rebuild_parameter", "text", False, HOOKS),
}


def sizes() -> Iterator[Case]:
    for (name, make), command in zip(LYING.items(), itertools.cycle((SAMPLE, RESUME))):
        yield Case(f"lying-{name}", edit(replace_weight(make)), command, NAMED)

    def hyper(*path: str, value: Any) -> Callable[[], None]:
        *keys, last = path

        def change(content: Content) -> None:
            place = functools.reduce(operator.getitem, keys, content["hyper_parameters"])
            place[last] = value

        return edit(change)

    for name in ("model_channels", "num_classes"):
        spoil = hyper("network", "init_args", name, value=10**10)
        yield Case(f"network-{name}", spoil, SAMPLE, NAMED)
    shape = hyper("image_shape", value=[1, 10**6, 10**6])
    yield Case("image-shape", shape, SAMPLE, "not enough memory", codes=(1,))
    yield Case("steps", hyper("solver", "init_args", "steps", value=10**12), SAMPLE, "steps")
    yield Case("bomb-deep", _deep_list, RESUME, NAMED)
    yield Case("bomb-zip", _zip_bomb, SAMPLE, NAMED)
    yield Case("bomb-pickle", _pickle_bomb, SAMPLE, NAMED)


def _deep_list() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    sys.setrecursionlimit(10**5)
    edit(lambda content: content["hyper_parameters"].update(network=value))()
    sys.setrecursionlimit(1000)


def _zip_bomb() -> None:
    """A member of 1 GiB of zeros."""
    pack = {"compression": zipfile.ZIP_DEFLATED, "compresslevel": 1}
    with zipfile.ZipFile(LAST, "a", **pack) as file:
        file.writestr("archive/data/9999", bytes(2**30))


def _pickle_bomb() -> None:
    big = pickle.dumps({"state_dict": {}, "x": "a" * 2 * 10**8}, protocol=2)
    with zipfile.ZipFile(LAST) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(LAST, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, big if name.endswith("data.pkl") else data)


# Code


GADGETS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Call(os.system, TOUCH),
    "eval": lambda: Call(eval, WRITE),
    "partial": lambda: functools.partial(os.system, TOUCH),
    "runpy": lambda: Call(__import__("runpy").run_path, "strangers/stranger.py"),
    "rebuild of a call": lambda: Call(
        torch._utils._rebuild_parameter_with_state, torch.zeros(1), False, HOOKS, {"__class__": 1}
    ),
    "rebuild from type": lambda: Call(
        torch._tensor._rebuild_from_type_v2, builtins.eval, torch.Tensor, (WRITE,), {}
    ),
    "wrapper subclass": lambda: Call(
        torch._utils._rebuild_wrapper_subclass,
        *(os.system, torch.float32, (1,), (1,), 0, torch.strided, "cpu", False),
    ),
}


def code() -> Iterator[Case]:
    """In a zip, where torch.save puts it, and as a pickle without one."""
    commands = itertools.cycle((*COMMANDS, ALONE))
    for i, ((name, make), command) in enumerate(zip(GADGETS.items(), commands, strict=False)):

        def planted(make: Callable[[], Any] = make, protocol: int = 2 + 2 * (i % 2)) -> None:
            content = torch.load(LAST, weights_only=True)
            content["callbacks"]["gadget"] = make()
            torch.save(content, LAST, pickle_protocol=protocol)

        yield Case(f"code-{name}", planted, command, NAMED)

    def bare() -> None:
        LAST.write_bytes(pickle.dumps({"state_dict": {}, "gadget": GADGETS["os.system"]()}, 2))

    for command in (SAMPLE, RESUME):
        yield Case(f"code-in-a-bare-pickle-{command.split()[0]}", bare, command, NAMED)


PATHS = (
    *("os.system", "stranger.Net", "torch.hub.load"),
    *("torch.nn.modules.module.torch.os.system", "torch.utils.cpp_extension.load"),
    *("lit_diffusion.cli.main.main", "lit_diffusion.checkpoints.saving.pickle.loads"),
    *("", "torch.nn", "no.such.module", "\x00", "../stranger.Net"),
)
SLOTS = ("network", "process", "solver", "optimizer", "parameterization", "_class_path")


def class_paths() -> Iterator[Case]:
    inception, vae = "lit_diffusion.metrics.extractors._Inception", "lit_diffusion.modules.vae"
    weights = {"name": "a", "features_list": ["2048"], "feature_extractor_weights_path": "evil.pth"}

    def hyper(key: str, value: Any, part: str = "hyper_parameters") -> Callable[[], None]:
        return edit(lambda content: content[part].update({key: value}))

    def unpickles() -> None:
        torch.save(GADGETS["os.system"](), "evil.pth")
        hyper("network", spec(inception, **weights))()

    yield Case("class-that-unpickles", unpickles, SAMPLE, f"{NAMED}|model")
    clip = spec("lit_diffusion.metrics.vision_transformers._CLIP", content="evil.pth")
    yield Case("class-that-loads-torchscript", hyper("network", clip), SAMPLE, f"{NAMED}|model")
    reads = hyper("codec", spec(f"{vae}.VAECodec", folder="images"))
    yield Case("class-that-reads", reads, SAMPLE, f"{NAMED}: the checkpoint names the folder")
    args = {"command": TOUCH, "source": WRITE, "args": ["touch", f"../{CANARY}"]}
    for path, slot, command in zip(
        PATHS, itertools.cycle(SLOTS), itertools.cycle((SAMPLE, VALIDATE))
    ):
        spoil = hyper(slot, path if slot == "_class_path" else spec(path, **args))
        command = SAMPLE if slot == "_class_path" else command
        yield Case(f"class-{slot}-{path!r}", spoil, command, f"{NAMED}|model")
    for path in ("os.system", "stranger.call"):
        data = hyper("_class_path", path, "datamodule_hyper_parameters")
        yield Case(f"class-data-{path}", data, ALONE, NAMED, harmless=True)
        instantiator = hyper("_instantiator", path)
        yield Case(f"class-instantiator-{path}", instantiator, SAMPLE, NAMED, harmless=True)
