"""The run folder: where a command reads and writes, found before anything heavy is built.

Its files are listed in docs/runs.md.
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

    A job that SLURM has started again is `requeued`: it goes on from the last checkpoint of its run
    folder, whatever the command line says.
    """

    command: str  # fit, validate, test or predict
    options: tuple[str, ...]  # the command line without the command and --trust
    configs: tuple[str, ...]  # values of --config
    trust: tuple[str, ...]  # values of --trust
    root: Path  # the run folder
    checkpoint: Path | None  # file that --ckpt_path means; None without
    requeued: bool = False
    repeated: bool = False  # the command is repeated until the run is finished

    @property
    def holds_checkpoint(self) -> bool:
        """Whether the checkpoint belongs to this run folder."""
        run = run_of(self.checkpoint) if self.checkpoint else None
        return run is not None and run.resolve() == self.root.resolve()


def read_command_line(argv: Sequence[str]) -> Request:
    """Find run folder and checkpoint of a command line.

    The run folder is --trainer.default_root_dir of the command line or of a config (of a config
    that a run wrote, the folder that it is in); else that of the checkpoint; else runs/<name of the
    first config>.

    Args:
        argv: the command, then its options.

    Raises:
        FileNotFoundError: where --ckpt_path names a file that is not there.
        ValueError: for a config that is no YAML mapping, or an option without its value.
    """
    command = argv[0]
    parser = Parser(command, add_help=False)
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE")
    trusted, options = parser.parse_known_args(list(argv[1:]))
    parser = Parser(command, add_help=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--ckpt_path")
    parser.add_argument("--trainer.default_root_dir", dest="root")
    args, _ = parser.parse_known_args(options)  # which stay in `options`
    settings = [read_config(config) for config in args.config]
    ckpt_path = args.ckpt_path or _last_value(settings, "ckpt_path")
    ckpt_path = None if ckpt_path in (None, "null", "None") else str(ckpt_path)
    ckpt_path = ckpt_path and ckpt_path.removeprefix("file://")
    root = args.root or _last_value(settings, "trainer", "default_root_dir")
    if root is not None:
        root = Path(os.path.expanduser(str(root)))
    elif not (root := run_of(Path(ckpt_path)) if ckpt_path else None):
        root = Path("runs") / (Path(args.config[0]).stem if args.config else "unnamed")
    last = root / "checkpoints" / "last.ckpt"
    requeued = command == "fit" and is_requeue_of(last.parent)
    repeated = command == "fit" and ckpt_path == OR_NONE
    if requeued or repeated:
        if last.is_file():
            ckpt_path = "last"
        elif ckpt_path in (OR_NONE, "last"):
            ckpt_path = None
        options.append(f"--ckpt_path={ckpt_path or 'null'}")
    checkpoint = None
    # Lightning understands other names.
    others = (None, "hpc", "registry")
    if ckpt_path not in others and "://" not in ckpt_path:
        checkpoint = last if ckpt_path == "last" else Path(ckpt_path)
        if not checkpoint.is_file():
            start = f", or {OR_NONE} to start where there is none" if ckpt_path == "last" else ""
            raise FileNotFoundError(
                f"--ckpt_path: there is no file {checkpoint}; name another{start}."
            )
    options = [_inlined(option, args.config) for option in options]
    configs, trust = tuple(args.config), tuple(trusted.trust)
    return Request(command, tuple(options), configs, trust, root, checkpoint, requeued, repeated)


def _last_value(settings: Sequence[Any], *keys: str) -> Any:
    """The value of nested keys in the last of the settings that have it; None without."""
    value = None
    for setting in settings:
        for key in keys:
            setting = setting.get(key) if isinstance(setting, dict) else None
        value = setting if setting is not None else value
    return value


def _inlined(option: str, configs: Sequence[str]) -> str:
    """An option, or its value, with the content of a config that a run wrote for its name."""
    prefix, value = ("--config=", option[9:]) if option.startswith("--config=") else ("", option)
    if value not in configs or not _is_of_run(value):
        return option
    return f"{prefix}{yaml.safe_dump(read_config(value))}"


def read_config(config: str | Path) -> Any:
    """Content of a config; {} for one that is not there, which the real parser will report.

    In a config that a run wrote, the run folder is replaced by the folder that the file is in: the
    run may have been moved.
    """
    try:
        settings = read_yaml(config)
    except OSError:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold settings such as 'model: ...', got {settings!r:.50}.")
    _refuse_files(settings, Path(config))
    if not _is_of_run(config):
        return settings
    root = str(_last_value([settings], "trainer", "default_root_dir"))
    return _moved(settings, root, str(Path(config).parent))


def _is_of_run(config: str | Path) -> bool:
    """Whether a run wrote a config, which is still in its folder."""
    path = Path(config)
    return bool(re.fullmatch(r"config(\.resume-\d+)?\.yaml", path.name) and traces(path.parent))


def _moved(value: Any, old: str, new: str) -> Any:
    """Settings with the paths below one folder moved to another."""
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value[len(old) :]
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    return [_moved(item, old, new) for item in value] if isinstance(value, list) else value


def _refuse_files(value: Any, config: Path) -> None:
    """Raise ValueError for a file that jsonargparse would open: a config in a config, a pipe."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _refuse_files(part, config)
        if not isinstance(part, str):
            continue
        for file in (Path(part), config.parent / part):
            is_read = part.endswith((".yaml", ".yml", ".json")) or not os.path.isfile(file)
            if is_read and os.path.exists(file) and not file.is_dir():
                raise ValueError(
                    f"{config} names the file {file}, and configs are not read from within "
                    "configs: write its settings there, or give it as another --config."
                )


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/FILE; None for a file elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def latest_config(root: Path) -> Path | None:
    """The config that a run was last started or resumed with."""
    configs = [*root.glob("config.yaml"), *_resume_configs(root)]
    return configs[-1] if configs else None


def next_config(root: Path) -> Path:
    """Path for the config of a fit that starts now; those of earlier starts stay."""
    if traces(root):
        return root / f"config.resume-{len(_resume_configs(root)) + 1}.yaml"
    return root / "config.yaml"


def _resume_configs(root: Path) -> list[Path]:
    """In order: config.resume-9.yaml before config.resume-10.yaml."""
    return sorted(root.glob("config.resume-*.yaml"), key=lambda file: (len(file.name), file))


def traces(root: Path) -> list[Path]:
    """Files by which a folder holds a run: curves, scores and checkpoints."""
    min_lines = {root / "metrics.csv": 2, root / "evaluations.jsonl": 1}
    files = [file for file, num in min_lines.items() if _has_lines(file, num)]
    return files + sorted(root.glob("checkpoints/*.ckpt"))


def _has_lines(file: Path, num: int) -> bool:
    """Whether a file has `num` lines; True for what is no regular file, which is told later."""
    if not file.is_file():
        return file.exists()
    with file.open("rb") as lines:
        return len(list(islice(lines, num))) == num


def refuse_mixing(request: Request) -> None:
    """Refuse a fresh start, or one from a checkpoint elsewhere, in a folder that holds a run."""
    files = traces(request.root)
    begins = request.repeated and not any(file.suffix == ".ckpt" for file in files)
    if not files or begins or request.requeued or request.holds_checkpoint:
        return
    names = ", ".join(str(file.relative_to(request.root)) for file in files[:3])
    last = request.root / "checkpoints" / "last.ckpt"
    fix = "Continue it with --ckpt_path=last"
    if not last.is_file():
        fix = f"There is no {last}: continue it with --ckpt_path and another file, delete it"
    raise ValueError(
        f"{request.root} already holds a run ({names}). {fix}, or start another with "
        f"--trainer.default_root_dir={request.root}-2."
    )


@contextmanager
def occupied(root: Path) -> Iterator[None]:
    """Context in which no other process may train into a run folder, which is created.

    The kernel holds the lock, on a file: it ends with the process, however that ends, and holds for
    other nodes where the file system has locks.

    Raises:
        InUse: where another process has it.
        OSError: where the folder cannot be written to.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise OSError(
            f"The run folder {root} cannot be written to: {error.strerror}. "
            "Choose another with --trainer.default_root_dir."
        ) from error
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
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
