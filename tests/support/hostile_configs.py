"""Configs that are no configs, or in which one value is wrong."""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from support.hostile_case import CANARY, Case, change_config

FIT = "fit --config small.yaml --trainer.default_root_dir=runs/new"
CONFIG = Path("small.yaml")
SHIPPED = Path(__file__).parent.parent.parent / "configs" / "digits.yaml"

STRUCTURES = (None, "", "no such thing", "\u202eevil\u0000", [], {}, [[]], {"a": {"b": 1}})
NUMBERS = (-1, -(10**30), 10**30, "1e400", float("nan"), float("inf"), True, 0.5, "0x10", "1_0")
PATHS = ("os.system", "stranger.Net", "torch.load", "builtins.eval")

# Nobody can tell these from what is meant: strings that are free, numbers that may be large.
HARMLESS = True


def cases() -> Iterator[Case]:
    """All of them."""
    yield from mutations()
    yield from texts()
    yield from unknown_keys()
    yield from class_paths()
    yield from sizes()
    yield from optimizers()
    yield from no_files()
    yield from within()


def quick_digits() -> dict[str, Any]:
    """The shipped config, cut down so that a change that is taken costs a second."""
    config = yaml.safe_load(SHIPPED.read_text())
    trainer = {
        "max_steps": 1,
        "max_epochs": 1,
        "limit_train_batches": 1,
        "limit_val_batches": 1,
        "val_check_interval": 1,
        "check_val_every_n_epoch": 1,
        "enable_progress_bar": False,
    }
    config["trainer"].update(trainer)
    network = config["model"]["init_args"]["network"]["init_args"]
    network.update(model_channels=8, norm_groups=4)
    config["model"]["init_args"]["solver"]["init_args"]["steps"] = 2
    config["trainer"]["callbacks"][0]["init_args"].update(num_samples=16, batch_size=16)
    config["trainer"]["callbacks"][1]["init_args"].update(num=4, batch_size=4)
    return config


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Keys of everything below a value, of inner ones too."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def put(config: Any, path: tuple, value: Any) -> None:
    *way, last = path
    for key in way:
        config = config[key]
    config[last] = value


def putting(path: tuple, value: Any) -> Callable[[random.Random], None]:
    """What puts a value at one place of a config."""

    def spoil(rng: random.Random) -> None:
        config = quick_digits()
        put(config, path, value)
        CONFIG.write_text(yaml.safe_dump(config, sort_keys=False))

    return spoil


def mutations() -> Iterator[Case]:
    """At every place of configs/digits.yaml, values of another kind."""
    for number, path in enumerate(leaves(quick_digits())):
        rng = random.Random(number)
        values = [rng.choice(STRUCTURES), rng.choice(NUMBERS), rng.choice((*NUMBERS, *PATHS))]
        for i, value in enumerate(values):
            name = ".".join(map(str, path))
            last = next(str(key) for key in reversed(path) if isinstance(key, str))

            yield Case(
                "config: a wrong value at every place",
                f"mutation-{name}-{i}-{value!r:.20}",
                putting(path, value),
                FIT,
                rf"{last}|{path[0]}|config|not finite|memory|cannot be built|Group norm|bounds",
                codes=(1, 2),
                harmless=lambda: HARMLESS,
            )


def text(content: str | bytes) -> Callable[[random.Random], None]:
    def spoil(rng: random.Random) -> None:
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        CONFIG.write_bytes(data)

    return spoil


def _aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    return "\n".join([*lines, "model: *a29", ""])


def _merges() -> str:
    """744 bytes that PyYAML itself makes 10^11 pairs of."""
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
    return "\n".join([*lines, ""])


def _aliases_in(key: str) -> str:
    return f"{SHIPPED.read_text()}\n{_aliases().replace('model', key)}"


BROKEN = {
    "empty": "",
    "a blank": " \n",
    "a word": "model",
    "a number": "7",
    "a list": "- model\n- data\n",
    "null": "null",
    "an open list": "model: [1, 2",
    "an open quote": 'model: "abc',
    "tabs": "model:\n\tclass_path: x\n",
    "a key twice at odds": "model: 1\nmodel: {a: 1}\n",
    "an unknown tag": "model: !nothing 1\n",
    "a python object": f'model: !!python/object/apply:os.system ["touch ../{CANARY}"]\n',
    "python name": "model: !!python/name:os.system\n",
    "python module": "model: !!python/module:stranger\n",
    "python object new": 'model: !!python/object/new:os.system ["true"]\n',
    "a merge bomb": "a: &a {b: 1}\n" + "model: {<<: [*a, *a, *a]}\n",
    "an alias to itself": "model: &m {a: *m}\n",
    "an alias to nothing": "model: *nothing\n",
    "aliases of aliases": _aliases(),
    "aliases of aliases beside": _aliases_in("more"),
    "two documents": "model: 1\n---\nmodel: 2\n",
    "a NUL": "model: a\x00b\n",
    "nothing but NULs": "\x00" * 1000,
    "UTF-16": "model: 1\n".encode("utf-16"),
    "a lone surrogate": "model: \ud800\n",
    "latin-1": "model: \xe9\n".encode("latin-1"),
    "right to left": "\u202eledom: 1\n",
    "binary": random.Random(0).randbytes(10**4),
    "a zip": b"PK\x03\x04" + bytes(100),
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a pickle": b"cos\nsystem\n(S'true'\ntR.",
    "deep lists": "model: " + "[" * 3000 + "]" * 3000,
    "deep mappings": "\n".join(" " * i + f"k{i}:" for i in range(600)),
    "a huge key": "? " + "k" * 10**6 + "\n: 1\n",
    "a huge number": "seed_everything: " + "9" * 10**5,
    "a huge float": "model: {lr: 1e99999}\n",
    "merges of merges": _merges(),
    "an endless time": "model: 1" + ":1" * 1_500_000,
    "an endless time in a text": yaml.safe_dump({"seed_everything": "1" + ":1" * 400_000}),
    "a number of megabytes": "model: " + "9" * 3_000_000,
    "a float of megabytes": "model: 0." + "9" * 3_000_000,
    "dates": "seed_everything: 2001-01-01\n",
    "keys of other types": "1: 2\nnull: 3\n[a, b]: 4\n",
    "trainer is text": "trainer: text\n",
    "trainer is a list": "trainer: [1]\n",
    "ckpt_path is a list": "ckpt_path: [1]\n",
    "root is a list": "trainer: {default_root_dir: [1, 2]}\n",
    "root is a file": "trainer: {default_root_dir: small.yaml}\n",
    "config in config": "config: small.yaml\n",
}


def texts() -> Iterator[Case]:
    for name, content in BROKEN.items():
        yield Case(
            "config: no config",
            f"text-{name}",
            text(content),
            "fit --config small.yaml",
            r"small\.yaml|model|trainer|seed_everything|default_root_dir|no setting|ckpt_path",
        )
    whole = SHIPPED.read_bytes()
    for i in range(24):

        def cut(rng: random.Random) -> None:
            CONFIG.write_bytes(whole[: rng.randrange(len(whole))])

        def flip(rng: random.Random) -> None:
            data = bytearray(yaml.safe_dump(quick_digits()).encode())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            CONFIG.write_bytes(data)

        tells = r"small\.yaml|model|trainer|data|seed|\w+:|there is no"
        options = {"codes": (1, 2), "harmless": lambda: HARMLESS}
        small = "--trainer.max_steps=1 --trainer.limit_val_batches=1 --trainer.callbacks=[]"
        kind = "config: cut or flipped"
        yield Case(kind, f"config-cut-{i}", cut, f"{FIT} {small}", tells, **options)
        yield Case(kind, f"config-flipped-{i}", flip, FIT, tells, **options)


def unknown_keys() -> Iterator[Case]:
    holders = [
        path
        for path in [(), *leaves(quick_digits())]
        if isinstance(_at(quick_digits(), path), dict)
    ]
    for i, path in enumerate(holders):
        key = ("nosuch", "lr ", "__class__", "ckpt", "\u0131nit", "1")[i % 6]

        def spoil(rng: random.Random, path: tuple = path, key: str = key) -> None:
            config = quick_digits()
            _at(config, path)[key] = 1
            CONFIG.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

        name = ".".join(map(str, path)) or "top"
        tells = r"has no argument|there is no setting|class_path|not accepted|Key|key|callbacks"
        yield Case("config: a name that is not known", f"unknown-{name}", spoil, FIT, tells)


def _at(config: Any, path: tuple) -> Any:
    for key in path:
        config = config[key]
    return config


def class_paths() -> Iterator[Case]:
    """Class paths in every place that takes one, to what must not be imported or called."""
    slots = (
        *(("model",), ("data",), ("trainer", "callbacks", 0), ("trainer", "logger")),
        *(("trainer", "plugins"), ("trainer", "strategy"), ("trainer", "profiler")),
        *(("model", "init_args", name) for name in ("network", "optimizer", "solver", "loss")),
        *(("model", "init_args", name) for name in ("lr_scheduler", "times", "codec")),
    )
    named = (
        *("os.system", "subprocess.Popen", "stranger.Net", "stranger.call", "torch.hub.load"),
        *("torch.utils.cpp_extension.load", "builtins.eval", "lit_diffusion.cli.main.main"),
    )
    for i, (slot, path) in enumerate(itertools.product(slots, named)):
        if i % 2:
            continue
        args = {"command": f"touch ../{CANARY}", "args": ["touch", f"../{CANARY}"]}
        value = path if i % 3 else {"class_path": path, "init_args": args}

        yield Case(
            "config: class paths that must not be called",
            f"config-class-{'.'.join(map(str, slot))}-{path}",
            putting(slot, value),
            FIT,
            slot[-1] if isinstance(slot[-1], str) else slot[-2],
        )


SIZES: dict[str, Any] = {
    "model.init_args.network.init_args.model_channels": 10**9,
    "model.init_args.network.init_args.num_res_blocks": 10**9,
    "model.init_args.network.init_args.channel_mult": [1] * 10**5,
    "model.init_args.network.init_args.num_heads": 10**9,
    "model.init_args.network.init_args.num_classes": 10**15,
    "model.init_args.network.init_args.in_channels": 10**12,
    "model.init_args.image_shape": [1, 10**9, 10**9],
    "model.init_args.process.init_args.betas.init_args.num_steps": 10**13,
    "model.init_args.num_classes": 10**12,
    "data.init_args.batch_size": 10**12,
    "trainer.callbacks.0.init_args.num_samples": 10**15,
    "trainer.callbacks.1.init_args.num": 10**12,
    "trainer.callbacks.2.init_args.decays": [0.5] * 10**5,
}


def sizes() -> Iterator[Case]:
    for name, value in SIZES.items():
        path = tuple(int(key) if key.isdigit() else key for key in name.split("."))

        def spoil(rng: random.Random, path: tuple = path, value: Any = value) -> None:
            config = quick_digits()
            put(config, path, value)
            CONFIG.write_text(yaml.safe_dump(config, sort_keys=False))

        tells = rf"{path[-1]}|not enough memory|more than 100,000 bytes"
        yield Case("config: absurd sizes", f"size-{name}", spoil, FIT, tells, codes=(1, 2))


OPTIMIZERS = {
    "negative lr": {"lr": -1.0},
    "lr nan": {"lr": float("nan")},
    "lr inf": {"lr": float("inf")},
    "betas above 1": {"lr": 0.1, "betas": [2.0, 0.9]},
    "negative eps": {"lr": 0.1, "eps": -1.0},
    "negative decay": {"lr": 0.1, "weight_decay": -1.0},
    "one beta": {"lr": 0.1, "betas": [0.5]},
    "fused and foreach": {"lr": 0.1, "fused": True, "foreach": True},
}


def optimizers() -> Iterator[Case]:
    """What torch itself refuses, or trains on to no end."""
    for name, args in OPTIMIZERS.items():

        def change(config: dict, args: dict = args) -> None:
            config["model"]["init_args"]["optimizer"]["init_args"] = args

        yield Case(
            "config: an optimizer out of range",
            f"optimizer-{name}",
            lambda rng, change=change: change_config(change),
            FIT,
            "model.optimizer|not finite",
            codes=(1, 2),
        )


def no_files() -> Iterator[Case]:
    made: dict[str, Callable[[], Any]] = {
        "a folder": CONFIG.mkdir,
        "a link to nothing": lambda: CONFIG.symlink_to("nothing"),
        "a link to itself": lambda: CONFIG.symlink_to(CONFIG.name),
        "endless zeros": lambda: CONFIG.symlink_to("/dev/zero"),
        "nothing": lambda: CONFIG.symlink_to("/dev/null"),
        "a pipe": lambda: os.mkfifo(CONFIG),
        "not there": lambda: None,
    }
    commands = (FIT, "sweep small.yaml --seeds 0 --out sweep")
    for (name, make), command in itertools.product(made.items(), commands):

        def spoil(rng: random.Random, make: Callable[[], Any] = make) -> None:
            CONFIG.unlink()
            make()

        label = f"config-{name}-{command.split()[0]}"
        yield Case("config: no such file", label, spoil, command, r"small\.yaml")


WITHIN: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "a config": lambda path: path.write_text(SHIPPED.read_text()),
    "merges of merges": lambda path: path.write_text(_merges()),
}
NESTED = (("model",), ("data",), ("trainer",), ("trainer", "callbacks"))
NESTED += (("model", "init_args", "network"), ("trainer", "callbacks", 0))


def within() -> Iterator[Case]:
    """Files that a config names where it has settings, which jsonargparse would open."""
    for (name, make), path in itertools.product(WITHIN.items(), NESTED):
        file = "within" if name in ("a pipe", "endless zeros") else "within.yaml"

        def spoil(rng: random.Random, make: Any = make, path: tuple = path, file: str = file):
            make(Path(file))
            putting(path, file)(rng)

        label = f"within-{'.'.join(map(str, path))}-{name}"
        tells = "configs are not read from within configs"
        yield Case("config: a file within", label, spoil, FIT, tells)
