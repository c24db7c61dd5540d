"""Run folders in which a file is broken, for all commands that read them."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.cli.main import main
from lit_diffusion.cli.run_folder import CLAIM
from support.experiments import write_arm
from support.hostile_case import CANARY, LAST, RUN, Case
from support.hostile_checkpoints import RESUME, SAMPLE, TEST, VALIDATE

COMPARE = "compare runs/arms --out report"
SWEEP = "sweep small.yaml --seeds 0 --out runs/sweep"
EVALUATE = f"evaluate --checkpoint {RUN} --num 8"
ARM = Path("runs/arms/quick/seed-1")


def cases() -> Iterator[Case]:
    """All of them."""
    yield from evaluations()
    yield from metrics()
    yield from configs()
    yield from no_files()
    yield from tables()


def write_arms() -> None:
    write_arm(Path("runs/arms/baseline"), 1.0, range(2))
    write_arm(Path("runs/arms/quick"), 2.0, range(2))


def into(folder: Path, name: str, change: Callable[[str], str | bytes]) -> Any:
    """Change the text of a file of a run."""

    def spoil(rng: random.Random) -> None:
        if folder == ARM:
            write_arms()
        if folder == SWEPT:
            shutil.copytree(RUN, SWEPT)
            config = yaml.safe_load((SWEPT / "config.yaml").read_text())
            config["seed_everything"] = 0
            config["trainer"]["default_root_dir"] = str(SWEPT)
            (SWEPT / "config.yaml").write_text(yaml.safe_dump(config))
        changed = change((folder / name).read_text())
        data = changed if isinstance(changed, bytes) else changed.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(data)

    return spoil


SWEPT = Path("runs/sweep/baseline/seed-0")


def line(**changes: Any) -> Callable[[str], str]:
    """A further evaluation, the last one with something else in it."""

    def change(text: str) -> str:
        record = json.loads(text.splitlines()[-1]) | changes
        return text + json.dumps(record) + "\n"

    return change


LINES: dict[str, Callable[[str], str | bytes]] = {
    "no JSON": lambda text: text + "no json\n",
    "half a line amid": lambda text: text[: len(text) // 3] + "\n" + text,
    "a number": lambda text: text + "7\n",
    "a list": lambda text: text + "[1, 2]\n",
    "null": lambda text: text + "null\n",
    "an empty record": lambda text: text + "{}\n",
    "deep": lambda text: text + "[" * 10**5 + "\n",
    "a huge number": lambda text: text + '{"metric": "val/fid_16", "step": ' + "9" * 5000 + "}\n",
    "binary": lambda text: text.encode() + b"\xff\xfe\x00\n",
    "NULs": lambda text: text + "\x00" * 100 + "\n",
    "step is text": line(step="four"),
    "step is null": line(step=None),
    "step is negative": line(step=-4),
    "step is nan": line(step=float("nan")),
    "value is text": line(value="good"),
    "value is a list": line(value=[1]),
    "value is huge": line(value=1e400),
    "metric is null": line(metric=None),
    "metric is a list": line(metric=[1]),
    "seeds is null": line(seeds=None),
    "seeds is empty": line(seeds=[]),
    "protocol is code": line(protocol="os.system"),
    "images is text": line(images="many"),
    "HTML": line(metric="<script>alert(1)</script>fid", protocol="<img src=x onerror=alert(1)>"),
}


def evaluations() -> Iterator[Case]:
    commands = {COMPARE: ARM, RESUME: RUN, EVALUATE: RUN, SWEEP: SWEPT}
    name = "evaluations.jsonl"
    for (label, change), (command, folder) in itertools.product(LINES.items(), commands.items()):
        yield Case(
            "runs: a broken evaluations.jsonl",
            f"lines-{label}-{command.split()[0]}",
            into(folder, name, change),
            command,
            r"evaluations\.jsonl|FID protocol|seed-1",
            # Which fields matter depends on the command.
            harmless=lambda: True,
        )


def cell(column: str, value: str) -> Callable[[str], str]:
    """Another value in the last row."""

    def change(text: str) -> str:
        header, *rows = text.splitlines()
        names = header.split(",")
        cells = rows[-1].split(",")
        cells[names.index(column)] = value
        return "\n".join([header, *rows[:-1], ",".join(cells), ""])

    return change


ROWS: dict[str, Callable[[str], str | bytes]] = {
    "no header": lambda text: text.partition("\n")[2],
    "binary": lambda text: text.encode() + b"\xff\xfe\x00\n",
    "NULs": lambda text: text + "\x00" * 10 + "\n",
    "step is text": cell("step", "four"),
    "step is a fraction": cell("step", "1.5"),
    "step is nan": cell("step", "nan"),
    "step is huge": cell("step", "9" * 5000),
    "too many cells": lambda text: text + ",".join("1" * 40) + "\n",
    "an open quote": lambda text: text + '"1,2,3\n',
    "a huge field": lambda text: text + '"' + "x" * 200_000 + '"\n',
    "step twice": lambda text: text.replace("step,", "step,step,", 1),
    "empty": lambda text: "",
}


def metrics() -> Iterator[Case]:
    commands = {COMPARE: ARM, RESUME: RUN, SWEEP: SWEPT}
    for (label, change), (command, folder) in itertools.product(ROWS.items(), commands.items()):
        yield Case(
            "runs: a broken metrics.csv",
            f"rows-{label}-{command.split()[0]}",
            into(folder, "metrics.csv", change),
            command,
            r"metrics\.csv",
            harmless=lambda: True,
        )


CONFIGS: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "text": lambda text: "text",
    "a list": lambda text: "[1, 2]",
    "an open list": lambda text: text + "\nmore: [1",
    "binary": lambda text: b"\xff\xfe\x00",
    "python": lambda text: f'{text}\nmore: !!python/object/apply:os.system ["touch ../{CANARY}"]\n',
    "os.system": lambda text: text.replace("lit_diffusion.networks.unet.UNet", "os.system"),
    "stranger": lambda text: text.replace("lit_diffusion.data.digits.Digits", "stranger.Net"),
    "steps": lambda text: text.replace("max_steps: 4", "max_steps: many"),
    "deep": lambda text: "a: " + "[" * 3000,
}


def configs() -> Iterator[Case]:
    commands = {VALIDATE: RUN, TEST: RUN, COMPARE: ARM, SWEEP: SWEPT}
    for (label, change), (command, folder) in itertools.product(CONFIGS.items(), commands.items()):
        yield Case(
            "runs: a broken config.yaml",
            f"run-config-{label}-{command.split()[0]}",
            into(folder, "config.yaml", change),
            command,
            r"config\.yaml|small\.yaml|model|data|max_steps|network|seed-1|seed-0",
            harmless=lambda: True,
        )


def follows_no_link() -> bool:
    """Whether a save has replaced what was planted, and left alone what that points to."""
    return "class_path" in Path("small.yaml").read_text() and not LAST.is_symlink()


def no_files() -> Iterator[Case]:
    """Folders, links and pipes where a run has files."""
    makers: dict[str, Callable[[Path], Any]] = {
        "a folder": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "endless zeros": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": os.mkfifo,
    }
    files = {"evaluations.jsonl": (RESUME, EVALUATE), "metrics.csv": (RESUME,)}
    files["config.yaml"] = (VALIDATE, EVALUATE)
    for (label, make), (name, commands) in itertools.product(makers.items(), files.items()):
        for command in commands:

            def spoil(rng: random.Random, make: Any = make, name: str = name) -> None:
                (RUN / name).unlink(missing_ok=True)
                make(RUN / name)

            word = command.split()[0]
            tells = rf"{name.replace('.', '[.]')}|--config|pass the run's config|extractor weights"
            case = f"run-{name}-{label}-{word}"
            fine = (lambda: True) if label == "a link to nothing" else None
            yield Case("runs: no such file", case, spoil, command, tells, harmless=fine)

    del makers["endless zeros"]  # the guard takes a link to them for them, though nobody follows it
    for label, make in makers.items():

        def claim(rng: random.Random, make: Any = make) -> None:
            (RUN / CLAIM).unlink()
            make(RUN / CLAIM)

        fine = (lambda: True) if label == "a pipe" else None  # which can be locked like a file
        case = f"run-lock-{label}"
        yield Case("runs: no such file", case, claim, RESUME, r"\.lock", harmless=fine)
    makers["a link to another file"] = lambda path: path.symlink_to("../../../small.yaml")
    for label, make in makers.items():

        def planted(rng: random.Random, make: Any = make) -> None:
            make(LAST.with_name("..last.ckpt.end.part"))  # of the last save

        wrote = ("config.resume-1.yaml", "metrics.csv", "before-last.ckpt", "evaluations.jsonl")
        yield Case(
            "runs: no such file",
            f"run-temporary-{label}",
            planted,
            RESUME,
            r"last\.ckpt could not be written",
            harmless=None if label == "a folder" else follows_no_link,
            writes=wrote,
        )

    def checkpoints_is_a_file(rng: random.Random) -> None:
        shutil.rmtree(LAST.parent)
        LAST.parent.write_text("x")

    yield Case("runs: no such file", "checkpoints-a-file", checkpoints_is_a_file, SAMPLE, "last")
    for command in (SAMPLE, COMPARE.replace("runs/arms", "nowhere"), EVALUATE):
        away = lambda rng: shutil.rmtree("runs")  # noqa: E731
        label = f"no-run-{command.split()[0]}"
        yield Case("runs: no such file", label, away, command, "runs/small|nowhere")


TABLES = {
    "empty": "",
    "no columns": "a,b\n1,2\n",
    "text": "arm,step,fid\na,one,2\n",
    "negative": "arm,step,fid\na,-1,2\nb,1,2\n",
    "infinite": "arm,step,fid\na,inf,2\nb,1,2\n",
    "one arm": "arm,step,fid\na,1,2\n",
    "short rows": "arm,step,fid\na\nb\n",
    "NULs": "arm,step,fid\n\x00,1,2\n",
    "a huge field": "arm,step,fid\n" + "x" * 200_000 + ",1,2\n",
    "an open quote": 'arm,step,fid\n"a,1,2\n',
    "huge steps": "arm,step,fid\na,1e308,2\nb,1e308,1\n",
    "one point": "arm,step,fid\na,1,nan\nb,1,nan\n",
    "no name": "arm,step,fid\n,1,2\n",
}


def tables() -> Iterator[Case]:
    for name, text in TABLES.items():
        yield Case(
            "runs: a broken CSV of curves",
            f"table-{name}",
            lambda rng, text=text: Path("curves.csv").write_text(text),
            "compare curves.csv --out report",
            r"curves\.csv|FID|arm",
            harmless=(lambda: True) if name == "huge steps" else None,
        )


def run_everything() -> None:
    """Train with every callback, sweep, sample, evaluate and compare: whatever writes files."""
    from support.hostile_case import healthy_config
    from support.tiny_run import write_config

    config = healthy_config()
    names = {
        "SampleGrid": {"num": 4, "every_n_steps": 2},
        "NoiseLevelLoss": {"num_levels": 2, "num_images": 4},
        "StepSeed": {},
        "SaveOnSignal": {},
    }
    config["trainer"]["callbacks"] += [
        {"class_path": f"lit_diffusion.callbacks.{name}", "init_args": args}
        for name, args in names.items()
    ]
    write_config(config, Path("small.yaml"))
    write_config(
        {
            "model": {
                "init_args": {
                    "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
                }
            }
        },
        Path("arm.yaml"),
    )
    for command in (
        "fit --config small.yaml",
        RESUME,
        f"sample --checkpoint {RUN} --num 4 --out samples",
        f"evaluate --checkpoint {RUN} --num 8 --out evaluated",
        "sweep small.yaml --arms arm.yaml --seeds 0,1 --out sweep",
    ):
        assert main(command.split()) == 0, command
