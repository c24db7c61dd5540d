"""The run folder: where a command reads and writes, found before anything heavy is built.

What is in it is listed in docs/runs.md.
"""

import fcntl
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.callbacks.slurm import is_requeue_of
from lit_diffusion.cli.options import Parser
from lit_diffusion.config.yaml_file import read_yaml

CLAIM = ".lock"
"""File in a run folder on which the process that trains into it has a lock."""

OR_NONE = "last-or-none"
"""--ckpt_path of a command that is repeated until a run is finished, as `sweep --print` has it."""


class InUse(ValueError):
    """Another process has a run folder."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for, as far as it must be known before the config is parsed.

    A later start of the SLURM job that trains in the run folder is `requeued`: it goes on from its
    last checkpoint, whatever the command line names.
    """

    command: str  # fit, validate, test or predict
    options: tuple[str, ...]  # the command line without the command and --trust
    configs: tuple[str, ...]  # values of --config
    trust: tuple[str, ...]  # values of --trust
    root: Path  # the run folder
    checkpoint: Path | None  # file that --ckpt_path means; None without
    requeued: bool = False
    repeated: bool = False  # the command is, until the run is finished

    @property
    def holds_checkpoint(self) -> bool:
        """Whether the checkpoint belongs to this run folder."""
        run = run_of(self.checkpoint) if self.checkpoint else None
        return run is not None and run.resolve() == self.root.resolve()


def read_command_line(argv: Sequence[str]) -> Request:
    """Find run folder and checkpoint of a command line.

    The run folder is what --trainer.default_root_dir says on the command line or in a config, where
    one that a run wrote stands for the folder that it is in; else that of the checkpoint; else
    runs/<name of the first config>.

    Raises:
        FileNotFoundError: where --ckpt_path names a file that is not there.
        ValueError: for a config that is no YAML mapping, or an option without its value.
    """
    own = Parser(argv[0], add_help=False)
    own.add_argument("--trust", action="append", default=[], metavar="PACKAGE")
    found, options = own.parse_known_args(list(argv[1:]))
    peek = Parser(argv[0], add_help=False)
    peek.add_argument("-c", "--config", action="append", default=[])
    peek.add_argument("--ckpt_path")
    peek.add_argument("--trainer.default_root_dir", dest="root")
    seen, _ = peek.parse_known_args(options)
    settings = [read_config(config) for config in seen.config]
    stated = seen.root or _last(settings, "trainer", "default_root_dir")
    wanted = seen.ckpt_path or _last(settings, "ckpt_path")
    wanted = None if wanted in (None, "null", "None") else str(wanted).removeprefix("file://")
    root = _root(stated, wanted, seen.config)
    fits = argv[0] == "fit"
    requeued, repeated = fits and is_requeue_of(root / "checkpoints"), fits and wanted == OR_NONE
    if requeued or repeated:
        is_there = (root / "checkpoints" / "last.ckpt").is_file()
        wanted = "last" if is_there else None if wanted in (OR_NONE, "last") else wanted
        options.append(f"--ckpt_path={wanted or 'null'}")
    checkpoint = _checkpoint(wanted, root)
    if checkpoint and not checkpoint.is_file():
        start = f", or {OR_NONE} to start where there is none" if wanted == "last" else ""
        raise FileNotFoundError(f"--ckpt_path: there is no file {checkpoint}; name another{start}.")
    configs, trust = tuple(seen.config), tuple(found.trust)
    options = [_inlined(option, seen.config) for option in options]
    return Request(argv[0], tuple(options), configs, trust, root, checkpoint, requeued, repeated)


def read_config(config: str | Path) -> Any:
    """Content of a config; {} for one that is not there, which the real parser will report.

    What names the folder that a run was trained in names the one that its config is in now.
    """
    try:
        settings = read_yaml(config)
    except OSError:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold settings such as 'model: ...', got {settings!r:.50}.")
    _refuse_files(settings, Path(config))
    old = _last([settings], "trainer", "default_root_dir")
    return _moved(settings, str(old), str(Path(config).parent)) if _is_of_run(config) else settings


def _is_of_run(config: str | Path) -> bool:
    """Whether a run wrote a config, which is still in its folder."""
    path = Path(config)
    return bool(re.fullmatch(r"config(\.resume-\d+)?\.yaml", path.name) and traces(path.parent))


def _moved(value: Any, old: str, new: str) -> Any:
    """Settings with what is in one folder in another."""
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value[len(old) :]
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    return [_moved(item, old, new) for item in value] if isinstance(value, list) else value


def _inlined(option: str, configs: Sequence[str]) -> str:
    """An option, or its value, with a config that a run wrote in place of that file's name."""
    name, value = option.split("=", 1) if option.startswith("--config=") else ("", option)
    if value not in configs or not _is_of_run(value):
        return option
    return f"{name}{'=' * bool(name)}{yaml.safe_dump(read_config(value))}"


def _refuse_files(settings: dict[str, Any], config: Path) -> None:
    """jsonargparse would open configs within a config, and pipes, without a look at them."""
    for value in _texts(settings):
        for file in (Path(value), config.parent / value):
            opened = value.endswith((".yaml", ".yml", ".json")) or not os.path.isfile(file)
            if opened and os.path.exists(file) and not file.is_dir():
                raise ValueError(
                    f"{config} names the file {file}, and configs are not read from within "
                    "configs: write its settings there, or give it as another --config."
                )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    inside = value.values() if isinstance(value, dict) else value
    for part in inside if isinstance(value, dict | list) else ():
        yield from _texts(part)


def _last(settings: Sequence[Any], *keys: str) -> Any:
    """The value of nested keys in the last of the settings that have it."""
    value = None
    for setting in settings:
        for key in keys:
            setting = setting.get(key) if isinstance(setting, dict) else None
        value = setting if setting is not None else value
    return value


def _root(stated: Any, wanted: str | None, configs: Sequence[str]) -> Path:
    if stated is not None:
        return Path(os.path.expanduser(str(stated)))
    if wanted and (run := run_of(Path(wanted))):
        return run
    return Path("runs") / (Path(configs[0]).stem if configs else "unnamed")


def _checkpoint(wanted: str | None, root: Path) -> Path | None:
    """The file that --ckpt_path means; names other than last are Lightning's to understand."""
    if wanted is None or wanted in ("best", "hpc", "registry") or "://" in wanted:
        return None
    return root / "checkpoints" / "last.ckpt" if wanted == "last" else Path(wanted)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/FILE; None for a file elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def latest_config(root: Path) -> Path | None:
    """The config that a run was last started or resumed with."""
    configs = [*root.glob("config.yaml"), *_resumes(root)]
    return configs[-1] if configs else None


def next_config(root: Path) -> Path:
    """Where the config of a fit that starts now goes: a resume leaves those before it alone."""
    if traces(root):
        return root / f"config.resume-{len(_resumes(root)) + 1}.yaml"
    return root / "config.yaml"


def traces(root: Path) -> list[Path]:
    """What shows that a folder holds a run: curves, scores and checkpoints."""
    rows = {root / "metrics.csv": 1, root / "evaluations.jsonl": 0}  # beside the header
    files = [file for file, header in rows.items() if _has_lines(file, header + 1)]
    files += sorted(root.glob("checkpoints/*.ckpt"))
    return files if len(files) != 1 or not _is_of_a_false_start(files[0]) else []


def _is_of_a_false_start(file: Path) -> bool:
    """Whether a metrics.csv holds nothing but that a loss or gradient was not finite."""
    with file.open("rb") as lines:
        return next(lines, b"").strip() == b"step,train/loss,train/nonfinite_steps"


def _has_lines(file: Path, num: int) -> bool:
    if not file.is_file():
        return file.exists()  # and is no run's, which will be said
    with file.open("rb") as lines:
        return len(list(islice(lines, num))) == num


def refuse_mixing(request: Request) -> None:
    """Refuse a fresh start, or one from a checkpoint elsewhere, in a folder that holds a run."""
    found = traces(request.root)
    begins = request.repeated and not any(file.suffix == ".ckpt" for file in found)
    if not found or begins or request.requeued or request.holds_checkpoint:
        return
    what = ", ".join(str(file.relative_to(request.root)) for file in found[:3])
    last = request.root / "checkpoints" / "last.ckpt"
    way = "Continue it with --ckpt_path=last"
    if not last.is_file():
        way = f"There is no {last}: continue it with --ckpt_path and another file, delete it"
    raise ValueError(
        f"{request.root} already holds a run ({what}). {way}, or start another with "
        f"--trainer.default_root_dir={request.root}-2."
    )


@contextmanager
def occupied(root: Path) -> Iterator[None]:
    """Context in which no other process may train into the run folder, which is made if need be.

    The kernel holds the claim, on a file: it ends with the process, however that ends, and holds
    for other nodes where the file system has locks.

    Raises:
        InUse: where another process has it.
        OSError: where it cannot be written to.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise OSError(
            f"The run folder {root} cannot be written to: {error.strerror}. "
            "Choose another with --trainer.default_root_dir."
        ) from error
    with os.fdopen(os.open(root / CLAIM, flags, 0o666), "rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(
                f"{root} is in use: another process trains into it. Wait for it, or start another "
                f"run with --trainer.default_root_dir={root}-2."
            ) from error
        except OSError as error:
            warnings.warn(
                f"{root} cannot be locked ({error.strerror}); see to it that no other process "
                "trains into it.",
                stacklevel=2,
            )
        yield


def _resumes(root: Path) -> list[Path]:
    """In order: config.resume-9.yaml before config.resume-10.yaml."""
    return sorted(root.glob("config.resume-*.yaml"), key=lambda file: (len(file.name), file))
