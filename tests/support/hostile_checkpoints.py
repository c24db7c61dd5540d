"""Checkpoints that are cut, damaged, forged or malicious."""

import builtins
import functools
import io
import itertools
import operator
import os
import pickle
import posix
import random
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_diffusion.checkpoints.reading import read_checkpoint
from support.hostile_case import CANARY, LAST, RUN, Case

SAMPLE = f"sample --checkpoint {RUN} --num 2 --out out"
RAW = f"{SAMPLE} --weights raw"
EVALUATE = f"evaluate --checkpoint {LAST} --num 8"
VALIDATE = f"validate --ckpt_path {LAST}"
TEST = f"test --ckpt_path {LAST}"
RESUME = "fit --config small.yaml --ckpt_path=last --trainer.max_steps=5"
COMMANDS = (SAMPLE, RAW, RESUME, VALIDATE, EVALUATE, SAMPLE, RESUME, TEST)
NAMED = r"last\.ckpt"

Content = dict[str, Any]


def cases() -> Iterator[Case]:
    """All of them."""
    yield from truncated()
    yield from flipped()
    yield from misfits()
    yield from structures()
    yield from leaves()
    yield from not_finite()
    yield from absurd()
    yield from gadgets()
    yield from class_paths()
    yield from no_files()


# Damage


def truncated(count: int = 48) -> Iterator[Case]:
    ends = [0, 1, 4, 30, 64, -1, -4, -21, -22, -23, -100]

    def at(end: int | None) -> Callable[[random.Random], None]:
        def cut(rng: random.Random) -> None:
            size = LAST.stat().st_size
            os.truncate(LAST, rng.randrange(size) if end is None else end % size)

        return cut

    for i, command in zip(range(count), itertools.cycle(COMMANDS), strict=False):
        end = ends[i] if i < len(ends) else None
        yield Case("checkpoint: truncated", f"truncated-{i}", at(end), command, NAMED)


def flipped(count: int = 90) -> Iterator[Case]:
    """A bit of a header, of the pickle, of a tensor or anywhere."""

    def flip(where: str) -> Callable[[random.Random], None]:
        def spoil(rng: random.Random) -> None:
            shutil.copy(LAST, "sound.ckpt")
            data = bytearray(LAST.read_bytes())
            start, end = places(where, rng)
            data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
            LAST.write_bytes(data)
            shutil.copy(LAST, "spoilt.ckpt")  # a resume that finds no harm writes another

        return spoil

    kinds = ("local header", "directory", "end", "pickle", "tensor", "anywhere")
    for i in range(count):
        where = kinds[i % len(kinds)]
        command = (SAMPLE, RAW, RESUME)[i // len(kinds) % 3]
        yield Case(
            "checkpoint: a flipped bit",
            f"flipped-{i}-{where}",
            flip(where),
            command,
            NAMED,
            harmless=equals_sound,
        )


def places(where: str, rng: random.Random) -> tuple[int, int]:
    """First and last byte of a part of the file."""
    size = LAST.stat().st_size
    with zipfile.ZipFile(LAST) as file:
        entries = file.infolist()
        directory = file.start_dir
    entry = rng.choice([e for e in entries if ("/data/" in e.filename) == (where != "pickle")])
    if where == "pickle":
        entry = next(e for e in entries if e.filename.endswith("data.pkl"))
    with LAST.open("rb") as raw:
        raw.seek(entry.header_offset)
        header = raw.read(30)
    start = entry.header_offset + 30 + sum(header[26:30:2]) + 256 * sum(header[27:30:2])
    return {
        "local header": (entry.header_offset, entry.header_offset + 30),
        "directory": (directory, size - 22),
        "end": (size - 98, size),
        "anywhere": (0, size),
    }.get(where, (start, start + entry.file_size))


def equals_sound() -> bool:
    """Whether the spoilt file holds the same as before."""
    return same(read_checkpoint(Path("spoilt.ckpt")), read_checkpoint(Path("sound.ckpt")))


def same(one: Any, other: Any) -> bool:
    """Whether two contents are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# Forged content


def edit(change: Callable[[Content], Any]) -> Callable[[random.Random], None]:
    """Change what the checkpoint holds; the file is as torch.save writes it."""

    def spoil(rng: random.Random) -> None:
        content = torch.load(LAST, weights_only=True)
        content = change(content) or content
        torch.save(content, LAST)

    return spoil


def first_weight(content: Content) -> str:
    return next(name for name, value in content["state_dict"].items() if value.dim() == 4)


def replace_weight(
    make: Callable[[torch.Tensor], Any], where: str = "both"
) -> Callable[[Content], None]:
    """Put something in the place of the first weight: raw, in the last average, or in all."""

    def change(content: Content) -> None:
        name = first_weight(content)
        made = make(content["state_dict"][name])
        if where != "averaged":
            content["state_dict"][name] = made
        for key, state in content["callbacks"].items():
            if key.startswith("EMA{") and where != "raw":
                for shadow in state["shadows"][-1:] if where == "averaged" else state["shadows"]:
                    shadow[name] = made

    return change


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda w: w.transpose(0, 1),
    "flat": lambda w: w.flatten(),
    "scalar": lambda w: w.sum(),
    "empty": lambda w: w[:0],
    "wider": lambda w: torch.cat([w, w]),
    "one more dimension": lambda w: w[None],
    "a huge view of one number": lambda w: torch.zeros(()).expand(10**6, 10**6),
}
TYPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "int8": lambda w: w.to(torch.int8),
    "int64": lambda w: w.long(),
    "bool": lambda w: w > 0,
    "complex64": lambda w: w + 1j,
    "sparse": lambda w: w.to_sparse(),
    "meta": lambda w: w.to("meta"),
    "quantized": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    "nested": lambda w: torch.nested.nested_tensor([w.flatten(), w.flatten()[:3]]),
    "text": lambda w: "weight",
    "None": lambda w: None,
    "a list": lambda w: w.flatten().tolist(),
    "a dict": lambda w: {"weight": w},
    "a number": lambda w: 0.5,
    "numpy": lambda w: w.numpy(),
    "a storage": lambda w: w.untyped_storage(),
}


def misfits() -> Iterator[Case]:
    for commands, made, kind in (
        ((SAMPLE, RAW, RESUME), SHAPES, "wrong shape"),
        ((SAMPLE, RESUME, VALIDATE), TYPES, "wrong type"),
    ):
        for (name, make), command in itertools.product(made.items(), commands):
            label = f"{kind}-{name}-{command.split()[0]}-{command[-3:]}"
            yield Case(f"checkpoint: {kind}", label, edit(replace_weight(make)), command, NAMED)
            for where in ("raw", "averaged"):
                if not (where == "averaged" and (command == RAW or name == "a storage")):
                    spoil = edit(replace_weight(make, where))
                    # Averages that are sound take the place of weights that are not.
                    fine = anything if (where, command) == ("raw", SAMPLE) else None
                    args = (f"checkpoint: {kind}", f"{label}-{where}", spoil, command, NAMED)
                    yield Case(*args, harmless=fine)

    def keyed(change: Callable[[Content, str], Any]) -> Callable[[random.Random], None]:
        return edit(lambda content: change(content["state_dict"], first_weight(content)))

    keys = {
        "missing": lambda state, name: state.__delitem__(name),
        "extra": lambda state, name: state.update(more=torch.zeros(2)),
        "renamed": lambda state, name: state.update({"module." + name: state.pop(name)}),
        "number for a name": lambda state, name: state.update({7: state.pop(name)}),
        "none at all": lambda state, name: state.clear(),
    }
    for (name, change), command in itertools.product(keys.items(), (RAW, RESUME, VALIDATE)):
        label = f"keys-{name}-{command.split()[0]}"
        yield Case("checkpoint: wrong names", label, keyed(change), command, NAMED)


KEYS = {
    "state_dict": (SAMPLE, RESUME, VALIDATE, EVALUATE),
    "callbacks": (SAMPLE, RESUME, VALIDATE),
    "hyper_parameters": (SAMPLE, RESUME),
    "datamodule_hyper_parameters": (EVALUATE,),
    "global_step": (SAMPLE, RESUME),
    "epoch": (RESUME,),
    "loops": (RESUME,),
    "optimizer_states": (RESUME,),
    "lr_schedulers": (RESUME,),
    "pytorch-lightning_version": (RESUME,),
}
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "text",
    "negative": lambda: -1,
    "nan": lambda: float("nan"),
    "a list": lambda: [1, {"a": None}],
    "a dict": lambda: {"a": {"b": [1]}},
    "numbers for names": lambda: {1: 2, None: 3},
    "a tensor": lambda: torch.zeros(3),
    "huge": lambda: 10**400,
}


def structures() -> Iterator[Case]:
    """Each part of a checkpoint is missing, or something else."""
    may_lack = {"hyper_parameters", "pytorch-lightning_version", "datamodule_hyper_parameters"}
    for key, commands in KEYS.items():
        for command in commands:
            label = f"lacks-{key}-{command.split()[0]}"
            spoil = edit(lambda content, key=key: content.pop(key) and None)
            fine = anything if key in may_lack or command != RESUME else None
            tells = f"{NAMED}|holds no averages"
            codes = (1, 2) if command == VALIDATE else (2,)
            kind = "checkpoint: a part is missing"
            yield Case(kind, label, spoil, command, tells, codes, harmless=fine)
        for (name, make), command in zip(WRONG.items(), itertools.cycle(commands), strict=False):
            label = f"{key}-is-{name}-{command.split()[0]}"
            spoil = edit(lambda content, key=key, make=make: content.update({key: make()}))
            # Of these, {"a": ...} is what a module made in Python, or another callback, leaves.
            strange = name == "a dict" and key in ("hyper_parameters", "callbacks")
            strange |= key == "datamodule_hyper_parameters"  # evaluate asks the run's config
            yield Case(
                "checkpoint: a part is of another kind",
                label,
                spoil,
                command,
                f"{NAMED}|holds no averages" if strange else NAMED,
                (1, 2) if strange else (2,),
                harmless=anything if strange else None,
            )


def anything() -> bool:
    """What is spoilt does not matter for the command, or cannot be told from the truth."""
    return True


def leaves(count: int = 70) -> Iterator[Case]:
    """Something deep inside of what a resume restores."""
    parts = ("callbacks", "loops", "optimizer_states", "lr_schedulers", "hyper_parameters")

    def spoil_leaf(part: str, name: str) -> Callable[[random.Random], None]:
        def spoil(rng: random.Random) -> None:
            content = torch.load(LAST, weights_only=True)
            holder, key = rng.choice(list(_places(content[part])))
            holder[key] = WRONG[name]()
            torch.save(content, LAST)

        return spoil

    for i in range(count):
        part, name = parts[i % len(parts)], list(WRONG)[i % len(WRONG)]
        command = RESUME if i % 3 else SAMPLE if part == "callbacks" else VALIDATE
        yield Case(
            "checkpoint: a value deep inside",
            f"leaf-{i}-{part}-{name}",
            spoil_leaf(part, name),
            command,
            r"last\.ckpt|model\.|not finite|The checkpoint's average",
            codes=(1, 2),
            harmless=anything,
            writes=("config.resume-1.yaml", "metrics.csv", "non-finite-rank0.ckpt"),
        )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything below."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def not_finite() -> Iterator[Case]:
    numbers = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38}
    for (name, number), share in itertools.product(numbers.items(), ("one", "all")):

        def spoil(content: Content, number: float = number, share: str = share) -> None:
            def change(weight: torch.Tensor) -> torch.Tensor:
                made = weight.clone()
                made[... if share == "all" else 0] = number
                return made

            replace_weight(change)(content)

        for command in (SAMPLE, RESUME, EVALUATE):
            yield Case(
                "checkpoint: weights that are not finite",
                f"{name}-{share}-{command.split()[0]}",
                edit(spoil),
                command,
                "not finite|non-finite|NaN",
                codes=(1, 2),
                writes=(
                    "config.resume-1.yaml",
                    "metrics.csv",
                    "non-finite-rank0.ckpt",
                ),  # with the step of the loss
            )


# Absurd sizes


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


def rebuilt(name: str, *args: Any) -> Callable[[torch.Tensor], Call]:
    return lambda w: Call(getattr(torch._utils, name), *(a(w) if callable(a) else a for a in args))


def _storage(weight: torch.Tensor) -> Any:
    return torch.storage.TypedStorage(
        wrap_storage=weight.untyped_storage(), dtype=weight.dtype, _internal=True
    )


HOOKS = OrderedDict()
LYING = {
    "10^12 elements": rebuilt("_rebuild_tensor_v2", _storage, 0, (10**12,), (1,), False, HOOKS),
    "10^12 of one": rebuilt("_rebuild_tensor_v2", _storage, 0, (10**12,), (0,), False, HOOKS),
    "an offset": rebuilt("_rebuild_tensor_v2", _storage, 10**9, (4,), (1,), False, HOOKS),
    "negative offset": rebuilt("_rebuild_tensor_v2", _storage, -8, (4,), (1,), False, HOOKS),
    "negative size": rebuilt("_rebuild_tensor_v2", _storage, 0, (-4,), (1,), False, HOOKS),
    "negative stride": rebuilt("_rebuild_tensor_v2", _storage, 0, (4,), (-1,), False, HOOKS),
    "huge stride": rebuilt("_rebuild_tensor_v2", _storage, 0, (4, 4), (2**62, 1), False, HOOKS),
    "size of text": rebuilt("_rebuild_tensor_v2", _storage, 0, ("a",), (1,), False, HOOKS),
    "too few strides": rebuilt("_rebuild_tensor_v2", _storage, 0, (4, 4), (1,), False, HOOKS),
    "sparse": rebuilt(
        "_rebuild_sparse_tensor",
        torch.sparse_coo,
        (torch.full((1, 2), 10**9), torch.ones(2), (4,), False),
    ),
    "meta": rebuilt("_rebuild_meta_tensor_no_storage", torch.float32, (10**12,), (1,), False),
    "parameter of text": rebuilt("_rebuild_parameter", "text", False, HOOKS),
}


def absurd() -> Iterator[Case]:
    kind = "checkpoint: absurd sizes"
    for name, make in LYING.items():
        spoil = edit(replace_weight(make))
        yield Case(kind, f"lying-{name}", spoil, SAMPLE, NAMED)
        yield Case(kind, f"lying-{name}-resume", spoil, RESUME, NAMED)
    sizes = {
        "model_channels": 10**9,
        "channel_mult": [1] * 10**4,
        "num_classes": 10**12,
        "num_res_blocks": 10**9,
        "in_channels": 10**12,
    }
    for name, value in sizes.items():

        def grow(content: Content, name: str = name, value: Any = value) -> None:
            content["hyper_parameters"]["network"]["init_args"][name] = value

        yield Case(kind, f"network-{name}", edit(grow), SAMPLE, NAMED)

    def shape(content: Content) -> None:
        content["hyper_parameters"]["image_shape"] = [1, 10**6, 10**6]

    yield Case(kind, "image-shape", edit(shape), SAMPLE, "not enough memory", codes=(1,))
    yield Case(kind, "steps", edit(_steps), SAMPLE, r"steps")
    for command in (SAMPLE, RESUME):
        yield Case(kind, f"bomb-deep-{command.split()[0]}", _deep, command, NAMED)
    yield Case(kind, "zip-bomb", _zip_bomb, SAMPLE, NAMED)
    yield Case(kind, "zip-bomb-resume", _zip_bomb, RESUME, NAMED)
    yield Case(kind, "zip-bomb-pickle", _pickle_bomb, SAMPLE, NAMED)


def _steps(content: Content) -> None:
    content["hyper_parameters"]["solver"]["init_args"]["steps"] = 10**12


def _deep(rng: random.Random) -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    content = torch.load(LAST, weights_only=True)
    content["hyper_parameters"]["network"] = value
    sys.setrecursionlimit(10**5)
    torch.save(content, LAST)
    sys.setrecursionlimit(1000)


def rezipped(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the file again, each member changed."""
    with zipfile.ZipFile(LAST) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(LAST, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, change(name, data))


def _zip_bomb(rng: random.Random) -> None:
    """A member of 1 GiB of zeros."""
    rezipped(lambda name, data: data)
    with (
        zipfile.ZipFile(LAST, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("archive/data/9999", "w", force_zip64=True) as member,
    ):
        for _ in range(2**10):
            member.write(bytes(2**20))


def _pickle_bomb(rng: random.Random) -> None:
    big = pickle.dumps({"state_dict": {}, "x": "a" * 2 * 10**8}, protocol=2)
    rezipped(lambda name, data: big if name.endswith("data.pkl") else data, zipfile.ZIP_DEFLATED)


# Code


def leave(how: str) -> str:
    return f"{how} ../{CANARY}"


PYTHON = f"open('../{CANARY}', 'w').write('executed')"
GADGETS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Call(os.system, leave("touch")),
    "posix.system": lambda: Call(posix.system, leave("touch")),
    "os.popen": lambda: Call(os.popen, leave("touch")),
    "os.execvp": lambda: Call(os.execvp, "touch", ["touch", f"../{CANARY}"]),
    "subprocess.Popen": lambda: Call(subprocess.Popen, ["touch", f"../{CANARY}"]),
    "subprocess.check_output": lambda: Call(subprocess.check_output, leave("touch"), state=None),
    "eval": lambda: Call(eval, PYTHON),
    "exec": lambda: Call(exec, PYTHON),
    "compile": lambda: Call(compile, PYTHON, "x", "exec"),
    "open": lambda: Call(open, f"../{CANARY}", "w"),
    "io.open": lambda: Call(io.open, f"../{CANARY}", "w"),
    "getattr": lambda: Call(getattr, Call(__import__, "os"), "system"),
    "__import__": lambda: Call(__import__, "stranger"),
    "importlib": lambda: Call(__import__("importlib").import_module, "stranger"),
    "attrgetter": lambda: Call(next, Call(map, operator.attrgetter("stat"), [Call(open, "x")])),
    "partial": lambda: functools.partial(os.system, leave("touch")),
    "map": lambda: Call(next, Call(map, os.system, [leave("touch")])),
    "runpy": lambda: Call(__import__("runpy").run_path, "strangers/stranger.py"),
    "timeit": lambda: Call(__import__("timeit").timeit, PYTHON),
    "pickle.loads": lambda: Call(pickle.loads, pickle.dumps(Call(os.system, leave("touch")))),
    "torch.load": lambda: Call(torch.load, "evil.pt"),
    "torch.hub": lambda: Call(torch.hub.load, "somebody/something", "model"),
    "numpy.load": lambda: Call(np.load, "evil.npy"),
    "numpy.fromfile": lambda: Call(np.fromfile, "/etc/passwd"),
    "setattr": lambda: Call(setattr, torch.Tensor, "copy_", print),
    "shutil.rmtree": lambda: Call(shutil.rmtree, "runs"),
    "os.remove": lambda: Call(os.remove, "small.yaml"),
    "rebuild of a call": lambda: Call(
        torch._utils._rebuild_parameter_with_state, torch.zeros(1), False, HOOKS, {"__class__": 1}
    ),
    "rebuild from type": lambda: Call(
        torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (leave("touch"),), {}
    ),
    "rebuild from type, eval": lambda: Call(
        torch._tensor._rebuild_from_type_v2, builtins.eval, torch.Tensor, (PYTHON,), {}
    ),
    "wrapper subclass": lambda: Call(
        torch._utils._rebuild_wrapper_subclass,
        *(os.system, torch.float32, (1,), (1,), 0, torch.strided, "cpu", False),
    ),
    "a module": lambda: torch.nn.Linear(2, 2),
    "a device with state": lambda: Call(torch.device, "cpu", state={"a": 1}),
}


def gadgets() -> Iterator[Case]:
    """In a zip, where torch.save puts it, and as a pickle without one."""

    def planted(make: Callable[[], Any], protocol: int, commands: str) -> Any:
        def spoil(rng: random.Random) -> None:
            content = torch.load(LAST, weights_only=True)
            place = rng.choice([content, content["state_dict"], content["callbacks"]])
            place["gadget"] = make()
            torch.save(content, LAST, pickle_protocol=protocol)

        return spoil

    def bare(make: Callable[[], Any], protocol: int) -> Any:
        def spoil(rng: random.Random) -> None:
            LAST.write_bytes(pickle.dumps({"state_dict": {}, "gadget": make()}, protocol))

        return spoil

    kind = "checkpoint: malicious pickle"
    for i, (name, make) in enumerate(GADGETS.items()):
        command = COMMANDS[i % len(COMMANDS)]
        yield Case(kind, f"gadget-{name}", planted(make, 2, command), command, NAMED)
        other = COMMANDS[(i + 2) % len(COMMANDS)]
        if i % 2:
            yield Case(kind, f"gadget-4-{name}", planted(make, 4, other), other, NAMED)
        elif name not in ("a module",):
            yield Case(kind, f"gadget-bare-{name}", bare(make, 2), other, NAMED)


PATHS = (
    *("os.system", "builtins.eval", "builtins.exec", "subprocess.Popen", "subprocess.run"),
    *("stranger.Net", "stranger.call", "torch.load", "torch.hub.load", "torch.os.system"),
    *("torch.utils.cpp_extension.load", "torch.nn.modules.module.torch.os.system"),
    *("torch.fx.graph_module.reduce_graph_module", "torch.jit.load", "torch.compile"),
    *(
        "lit_diffusion.cli.main.main",
        "lit_diffusion.checkpoints.saving.pickle.loads",
        "pickle.loads",
    ),
    *(
        "lit_diffusion.lab.compare.sweep.run",
        "lit_diffusion.lab.compare.processes.subprocess.Popen",
    ),
    *("lightning.pytorch.cli.LightningCLI", "lightning.pytorch.Trainer", "webbrowser.open"),
    *("lit_diffusion.data.cifar10.Source", "torchvision.datasets.CIFAR10", "runpy.run_path"),
    *("", ".", "..", "os", "os.", "torch.nn", "torch.nn.NoSuch", "no.such.module", "a b", "\x00"),
    *("lit_diffusion", "lit_diffusion.nothing", "7", "nul\u0131.Net", "../stranger.Net"),
)
SLOTS = ("network", "process", "solver", "optimizer", "parameterization", "_class_path")


def class_paths() -> Iterator[Case]:
    kind = "checkpoint: class paths that must not be called"
    for i, path in enumerate(PATHS):
        slot = SLOTS[i % len(SLOTS)]

        def name_it(content: Content, slot: str = slot, path: str = path) -> None:
            hyper = content["hyper_parameters"]
            args = {"command": leave("touch"), "source": PYTHON, "args": ["touch", f"../{CANARY}"]}
            hyper[slot] = path if slot == "_class_path" else {"class_path": path, "init_args": args}

        command = (SAMPLE, VALIDATE)[i % 2] if slot != "_class_path" else SAMPLE
        yield Case(kind, f"class-{i}-{path}", edit(name_it), command, f"{NAMED}|model")
        if i % 4 == 0:

            def data(content: Content, path: str = path) -> None:
                content["datamodule_hyper_parameters"]["_class_path"] = path

            yield Case(
                kind, f"data-class-{i}-{path}", edit(data), EVALUATE, NAMED, harmless=anything
            )
        if i % 4 == 1:

            def instantiator(content: Content, path: str = path) -> None:
                content["hyper_parameters"]["_instantiator"] = path

            label = f"instantiator-{i}-{path}"
            yield Case(kind, label, edit(instantiator), SAMPLE, NAMED, harmless=anything)


# What is no file


def no_files() -> Iterator[Case]:
    def with_it(make: Callable[[], None]) -> Callable[[random.Random], None]:
        def spoil(rng: random.Random) -> None:
            LAST.unlink()
            make()

        return spoil

    made = {
        "a folder": LAST.mkdir,
        "a link to nothing": lambda: LAST.symlink_to("nothing"),
        "a link to itself": lambda: LAST.symlink_to(LAST.name),
        "a link to a folder": lambda: LAST.symlink_to("..", target_is_directory=True),
        "endless zeros": lambda: LAST.symlink_to("/dev/zero"),
        "nothing": lambda: LAST.symlink_to("/dev/null"),
        "a pipe": lambda: os.mkfifo(LAST),
        "text": lambda: LAST.write_text("state_dict: {}\n"),
        "random bytes": lambda: LAST.write_bytes(random.Random(0).randbytes(10**5)),
        "a PNG": lambda: shutil.copy("images/0.png", LAST),
        "a config": lambda: shutil.copy("small.yaml", LAST),
    }
    for (name, make), command in itertools.product(made.items(), (SAMPLE, RESUME, VALIDATE)):
        label = f"no-file-{name}-{command.split()[0]}"
        yield Case("checkpoint: no such file", label, with_it(make), command, NAMED)
