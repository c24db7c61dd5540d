"""Configs that are no configs, or in which one value is wrong."""

import functools
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from support.hostile import CANARY, CONFIG, FIT, TOUCH, Case, cut, flip, no_files

SHIPPED = Path(__file__).parent.parent.parent / "configs" / "digits.yaml"
MERGES = "\n".join(  # of which PyYAML itself makes 10^11 pairs
    ["a0: &a0 {k: v}"]
    + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)]
)


def cases() -> Iterator[Case]:
    """All but those that are drawn."""
    for name, content in BROKEN.items():
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        pattern = r"small\.yaml|model|trainer|seed_everything|default_root_dir|no setting|ckpt_path"
        write = functools.partial(CONFIG.write_bytes, data)
        yield Case(f"config-{name}", write, "fit --config small.yaml", pattern)
    commands = itertools.cycle((FIT, "sweep small.yaml --seeds 0 --out sweep"))
    missing = no_files(CONFIG) | {"not there": CONFIG.unlink}
    for (name, spoil), command in zip(missing.items(), commands, strict=False):
        yield Case(f"config-{name}", spoil, command, r"small\.yaml")
    pattern = r"has no argument|there is no setting|class_path|not accepted|[Kk]ey|callbacks"
    for place in UNKNOWN:
        yield Case(f"unknown-{place}", putting(place, 1), FIT, pattern)
    arguments = {"command": TOUCH, "args": ["touch", f"../{CANARY}"]}
    for i, (slot, path) in enumerate(zip(SLOTS, itertools.cycle(PATHS))):
        value = path if i % 3 == 0 else {"class_path": path, "init_args": arguments}
        pattern = slot.split(".")[1] if slot.endswith(".0") else slot.split(".")[-1]
        yield Case(f"class-{slot}-{path}", putting(slot, value), FIT, pattern)
    for place, value in SIZES.items():
        pattern = rf"{place.split('.')[-1]}|not enough memory|more than 100,000 bytes"
        yield Case(f"size-{place}", putting(place, value), FIT, pattern, codes=(1, 2))
    for place, name in zip(NESTED, itertools.cycle(WITHIN)):
        yield within(place, name)


def quick_digits() -> dict[str, Any]:
    """The shipped config, cut down so that a change that is taken costs a second."""
    config = yaml.safe_load(SHIPPED.read_text())
    once = ("max_steps", "max_epochs", "limit_train_batches", "limit_val_batches")
    once += ("val_check_interval", "check_val_every_n_epoch")
    config["trainer"] |= dict.fromkeys(once, 1) | {"enable_progress_bar": False}
    model = config["model"]["init_args"]
    model["network"]["init_args"] |= {"model_channels": 8, "norm_groups": 4}
    model["solver"]["init_args"]["steps"] = 2
    config["trainer"]["callbacks"][0]["init_args"] |= {"num_samples": 16, "batch_size": 16}
    config["trainer"]["callbacks"][1]["init_args"] |= {"num": 4, "batch_size": 4}
    return config


def putting(place: str, value: Any) -> Callable[[], None]:
    """What puts a value at one place of a config, whose keys are joined by dots."""

    def spoil() -> None:
        config = holder = quick_digits()
        *keys, last = [int(key) if key.isdigit() else key for key in place.split(".")]
        for key in keys:
            holder = holder[key]
        holder[last] = value
        CONFIG.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    return spoil


def places(value: Any, place: str = "") -> Iterator[str]:
    """Of everything below a value, of inner ones too."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], f"{place}.{key}".lstrip("."))


def mutated(rng: random.Random) -> Case:
    """A value of another kind somewhere; strings may be free, and numbers large."""
    place, value = rng.choice(list(places(quick_digits()))), rng.choice(VALUES)
    *_, last = [key for key in place.split(".") if not key.isdigit()]
    words = "config|not finite|memory|cannot be built|Group norm|bounds"
    pattern = rf"{last}|{place.split('.')[0]}|{words}"
    name = f"config-{place}-{value!r:.20}"
    return Case(name, putting(place, value), FIT, pattern, harmless=True, codes=(1, 2))


def damaged(rng: random.Random) -> Case:
    """Cut or flipped."""

    def spoil() -> None:
        shutil.copy(SHIPPED, CONFIG)
        if rng.random() < 0.5:
            cut(CONFIG, rng.random())
        else:
            CONFIG.write_text(yaml.safe_dump(quick_digits()))
            flip(CONFIG, rng)

    short = "--trainer.max_steps=1 --trainer.limit_val_batches=1 --trainer.callbacks=[]"
    pattern = r"small\.yaml|model|trainer|data|seed|\w+:|there is no"
    return Case("config-damaged", spoil, f"{FIT} {short}", pattern, harmless=True, codes=(1, 2))


PATHS = (
    *("os.system", "stranger.Net", "torch.hub.load", "builtins.eval"),
    "lit_diffusion.cli.main.main",
)
VALUES = (
    *(None, "", "no such thing", "\u202eevil\u0000", [], {}, [[]], {"a": {"b": 1}}),
    *(-1, -(10**30), 10**30, "1e400", float("nan"), float("inf"), True, 0.5, "0x10", "1_0"),
    *PATHS,
)
BROKEN = {
    "empty": "",
    "a list": "- model\n- data\n",
    "a python object": f'model: !!python/object/apply:os.system ["{TOUCH}"]\n',
    "merges of merges": MERGES,
    "a NUL": "model: a\x00b\n",
    "UTF-16": "model: 1\n".encode("utf-16"),
    "a lone surrogate": "model: \ud800\n",
    "binary": random.Random(0).randbytes(10**4),
    "deep lists": "model: " + "[" * 99_000,
    "an endless time": "model: 1" + ":1" * 1_500_000,
    "an endless time in a text": f"seed_everything: '1{':1' * 400_000}'\n",
    "keys of other types": "1: 2\nnull: 3\n[a, b]: 4\n",
    "root is a list": "trainer: {default_root_dir: [1, 2]}\n",
    "root is a file": "trainer: {default_root_dir: small.yaml}\n",
    "config in config": "config: small.yaml\n",
}
UNKNOWN = (  # the last key is none of its section
    *("model.nosuch", "trainer.ckpt", "trainer.callbacks.0.init_args.\u0131nit"),
    *("model.init_args.lr ", "model.init_args.network.init_args.__class__"),
)
SLOTS = (
    *("model", "data", "trainer.callbacks.0", "trainer.logger"),
    *("trainer.plugins", "trainer.strategy", "trainer.profiler"),
    *(f"model.init_args.{name}" for name in ("network", "optimizer", "solver", "loss")),
    *(f"model.init_args.{name}" for name in ("lr_scheduler", "times", "codec")),
)
SIZES: dict[str, Any] = {
    "model.init_args.network.init_args.model_channels": 10**9,
    "model.init_args.network.init_args.channel_mult": [1] * 10**5,
    "model.init_args.image_shape": [1, 10**9, 10**9],
    "model.init_args.process.init_args.betas.init_args.num_steps": 10**13,
    "data.init_args.batch_size": 10**12,
    "trainer.callbacks.1.init_args.num": 10**12,
}
WITHIN: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "endless zeros": lambda path: path.symlink_to("/dev/zero"),
    "a config": lambda path: path.write_text(SHIPPED.read_text()),
    "merges of merges": lambda path: path.write_text(MERGES),
}
NESTED = ("model", "data", "trainer", "trainer.callbacks", "trainer.callbacks.0")
NESTED += ("model.init_args.network",)


def within(place: str, name: str) -> Case:
    """A file that a config names where it has settings, which jsonargparse would open."""
    file = "within" if name in ("a pipe", "endless zeros") else "within.yaml"

    def spoil() -> None:
        WITHIN[name](Path(file))
        putting(place, file)()

    return Case(f"within-{place}-{name}", spoil, FIT, "a config or checkpoint cannot include")
