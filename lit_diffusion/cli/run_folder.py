"""Find the run folder of a command, before the command builds any object.

docs/runs.md lists the files of a run folder.
"""

import fcntl
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.callbacks.slurm import is_requeue_of
from lit_diffusion.cli.options import Parser
from lit_diffusion.config.yaml_file import read_yaml, refuse_files
from lit_diffusion.files import (
    check_option_values,
    check_regular,
    is_checkpoint,
    is_checkpoint_folder,
    path_after_replace,
)
from lit_diffusion.pretrained import find_model

CLAIM = ".lock"
"""File in a run folder that is locked by the process that trains into it."""

FIRST_SAVE = 20
"""Optimizer steps until a run first saves its last.ckpt."""

OR_NONE = "last-or-none"
"""Value of --ckpt_path in commands to repeat until the run is finished (`sweep --print`)."""


class InUse(ValueError):
    """Raised when another process trains into a run folder."""


@dataclass(frozen=True)
class Request:
    """The parts of a command line that must be known before its config is parsed.

    `requeued` means that SLURM has restarted the job. The job then continues from the last
    checkpoint of its run folder, whatever the command line says.
    """

    command: str  # fit, validate, test or predict
    options: tuple[str, ...]  # the command line without the command and --trust
    configs: tuple[str, ...]  # values of --config
    trust: tuple[str, ...]  # values of --trust
    root: Path  # the run folder
    checkpoint: Path | None  # file of --ckpt_path; None without
    requeued: bool = False
    repeated: bool = False  # the command is repeated until the run is finished

    @property
    def holds_checkpoint(self) -> bool:
        """Whether the checkpoint belongs to this run folder."""
        run = run_of(self.checkpoint) if self.checkpoint else None
        return run is not None and run.resolve() == self.root.resolve()


def read_command_line(argv: Sequence[str]) -> Request:
    """Find the run folder and the checkpoint of a command line.

    `argv` is the command, followed by its options. The run folder is, in this order of precedence:

    - the option --trainer.default_root_dir;
    - `trainer.default_root_dir` of a config. If a previous run wrote this config, the run folder is
      the folder that contains the config, because the run may have been moved;
    - the folder of the run that wrote the checkpoint;
    - runs/<name of the first config>.
    """
    command = argv[0]
    parser = Parser(command, add_help=False)
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE")
    trusted, options = parser.parse_known_args(list(argv[1:]))
    parser = Parser(command, add_help=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--ckpt_path")
    parser.add_argument("--trainer.default_root_dir", dest="root")
    args, _ = parser.parse_known_args(options)  # leaves `options` unchanged
    check_option_values(options)
    settings = [read_config(config) for config in args.config]
    roots = [(each.get("trainer") or {}).get("default_root_dir") for each in settings]
    root = next(filter(None, (args.root, *reversed(roots))), None)
    ckpt_paths = [each.get("ckpt_path") for each in settings]
    ckpt_path = next(filter(None, (args.ckpt_path, *reversed(ckpt_paths))), None)
    ckpt_path = None if ckpt_path in (None, "null", "None") else str(ckpt_path)
    ckpt_path = ckpt_path and os.path.expanduser(ckpt_path.removeprefix("file://"))
    lightning_names = (None, "hpc", "registry")  # Lightning itself resolves these, and URLs
    path = None
    if ckpt_path not in (*lightning_names, "last", OR_NONE) and "://" not in ckpt_path:
        path = Path(ckpt_path)
        is_run_folder = path.is_dir() and not is_checkpoint_folder(path)
        path = path / "checkpoints" / "last.ckpt" if is_run_folder else path
        ckpt_path = str(path)
    if root is not None:
        root = Path(os.path.expanduser(str(root)))
    elif not (root := run_of(path) if path else None):
        root = Path("runs") / (Path(args.config[0]).stem if args.config else "unnamed")
    last = path_after_replace(root / "checkpoints" / "last.ckpt")
    requeued = command == "fit" and is_requeue_of(last.parent)
    repeated = command == "fit" and ckpt_path == OR_NONE
    if requeued or repeated:
        if is_checkpoint(last):
            ckpt_path = "last"
        elif ckpt_path in (OR_NONE, "last"):
            ckpt_path = None
        options.append(f"--ckpt_path={ckpt_path or 'null'}")
    checkpoint = None
    if ckpt_path not in lightning_names and "://" not in ckpt_path:
        checkpoint = last if ckpt_path == "last" else path_after_replace(Path(ckpt_path))
        if not is_checkpoint(checkpoint):
            start = f", or {OR_NONE} to start where there is none" if ckpt_path == "last" else ""
            if find_model(str(args.ckpt_path)):
                start = (
                    f". The packaged model {args.ckpt_path} has no state of a run: train it "
                    f"further with `fit --init_weights {args.ckpt_path}`, score it with `evaluate "
                    f"--checkpoint {args.ckpt_path}`"
                )
            raise FileNotFoundError(
                f"--ckpt_path: there is no file {checkpoint}; name another{start}."
            )
    joined, configs, trust = _join_configs(options), tuple(args.config), tuple(trusted.trust)
    return Request(command, tuple(joined), configs, trust, root, checkpoint, requeued, repeated)


def _join_configs(options: Sequence[str]) -> Iterator[str]:
    """Yield the options, with --config FILE, -c FILE and -cFILE written as --config=FILE.

    The path of a config that a run wrote is replaced by its content.
    """
    remaining = iter(options)
    for option in remaining:
        if not (match := re.match(r"--config(=|$)|-c=?", option)):
            yield option
            continue
        is_alone = option in ("--config", "-c")
        config = os.path.expanduser(next(remaining, "") if is_alone else option[match.end() :])
        content = yaml.safe_dump(read_config(config)) if _is_run_config(config) else config
        yield f"--config={content}"


def read_config(config: str | Path) -> Any:
    """Return the content of a config, or {} if there is no file (the parser then raises an error).

    If a run wrote the config, the run folder may have been moved since. Therefore, in all paths of
    the config, the old run folder is replaced with the folder that contains the config now.
    """
    if os.path.isdir(config):
        fix = f"name a file in it, such as {os.path.join(config, 'config.yaml')}"
        raise ValueError(f"the config {config} is a folder; {fix}.")
    try:
        settings = read_yaml(config)
    except OSError:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold settings such as 'model: ...', got {settings!r:.50}.")
    refuse_files(settings, Path(config))
    if not isinstance(settings.get("trainer") or {}, dict):  # which jsonargparse would ignore
        got = f"got {settings['trainer']!r:.50}."
        raise ValueError(f"{config}: trainer must be settings such as 'max_steps: 1000', {got}")
    if not _is_run_config(config):
        return settings
    root = (settings.get("trainer") or {}).get("default_root_dir")
    return _replace_folder(settings, str(root), str(Path(config).parent))


def _is_run_config(config: str | Path) -> bool:
    """Whether a config was written by a run and is still in its run folder."""
    path = Path(config)
    return bool(re.fullmatch(r"config(\.resume-\d+)?\.yaml", path.name) and traces(path.parent))


def model_settings(request: Request) -> list[Any]:
    """The model settings in the configs and options of a command line, as nested dicts."""
    settings = [read_config(config).get("model") for config in request.configs]
    for option, following in zip(request.options, [*request.options[1:], ""], strict=True):
        name, equals, text = option.partition("=")
        is_config = name in ("--config", "-c")
        if not (is_config or name.startswith("--model")):
            continue
        text = text if equals else following
        with suppress(yaml.YAMLError, ValueError):  # a text for one argument
            value = {"folder": text} if name.endswith(".folder") else yaml.safe_load(text)
            settings.append(value.get("model") if is_config and isinstance(value, dict) else value)
    return settings


def _replace_folder(value: Any, old: str, new: str) -> Any:
    """Settings in which `new` replaces the folder `old` in all paths."""
    if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
        return new + value[len(old) :]
    if isinstance(value, dict):
        return {name: _replace_folder(item, old, new) for name, item in value.items()}
    return [_replace_folder(item, old, new) for item in value] if isinstance(value, list) else value


def run_of(checkpoint: Path) -> Path | None:
    """The run folder RUN of RUN/checkpoints/FILE; None for a file elsewhere."""
    folder = checkpoint.parent if checkpoint.parent.name else checkpoint.absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def latest_config(root: Path) -> Path | None:
    """The config of the last start or resume of a run; None without one."""
    configs = [*root.glob("config.yaml"), *_resume_configs(root).values()]
    return configs[-1] if configs else None


def next_config(root: Path) -> Path:
    """Return the path for a new config that does not overwrite an earlier config of the run."""
    if traces(root):
        return root / f"config.resume-{max(_resume_configs(root), default=0) + 1}.yaml"
    return root / "config.yaml"


def _resume_configs(root: Path) -> dict[int, Path]:
    """Configs of resumes by number, in ascending order."""
    files = {f.stem.removeprefix("config.resume-"): f for f in root.glob("config.resume-*.yaml")}
    return dict(sorted((int(number), f) for number, f in files.items() if number.isdecimal()))


def traces(root: Path) -> list[Path]:
    """Files that show that a folder contains a run: curves, scores and checkpoints.

    A metrics.csv that records only non-finite steps does not count if it is the only sign of a run.
    The result is then [], as for a folder without a run.
    """
    curves = root / "metrics.csv"
    min_lines = {curves: 2, root / "evaluations.jsonl": 1}
    files = [file for file, num in min_lines.items() if _has_lines(file, num)]
    files += sorted(root.glob("checkpoints/*.ckpt"))
    if files == [curves] and curves.is_file():
        with check_regular(curves).open("rb") as lines:
            names = {*next(lines).strip().split(b",")}
        if names == {b"step", b"train/loss", b"train/nonfinite_steps"}:
            return []
    return files


def _has_lines(file: Path, num: int) -> bool:
    """Whether a file has `num` lines or more; True for a pipe or folder, which fails later."""
    if not file.is_file():
        return file.exists()
    with check_regular(file).open("rb") as lines:
        return len(list(islice(lines, num))) == num


def _outlasts_first_save(file: Path) -> bool:
    """Whether a file is a checkpoint of a run that has had a last.ckpt.

    Other callbacks may save a checkpoint a few steps before the first last.ckpt is saved. A run
    that was killed in between starts again from the beginning.
    """
    from lit_diffusion.checkpoints.reading import read_step

    return file.suffix == ".ckpt" and not 0 <= read_step(file) <= 2 * FIRST_SAVE


def refuse_mixing(request: Request) -> None:
    """Raise ValueError if a new run would start in a folder that contains another run."""
    files = traces(request.root)
    is_first_start = request.repeated and not any(map(_outlasts_first_save, files))
    if not files or is_first_start or request.requeued or request.holds_checkpoint:
        return
    names = ", ".join(str(file.relative_to(request.root)) for file in files[:3])
    last = request.root / "checkpoints" / "last.ckpt"
    fix = "Continue it with --ckpt_path=last"
    if not is_checkpoint(path_after_replace(last)):
        fix = f"There is no {last}: continue with another file as --ckpt_path, delete the run"
    raise ValueError(
        f"{request.root} already holds a run ({names}). {fix}, or start another with "
        f"--trainer.default_root_dir={request.root}-2."
    )


@contextmanager
def occupied(root: Path) -> Iterator[None]:
    """Context that creates a run folder and locks it.

    The context raises InUse if another process trains into the folder. The file lock is released
    when the process ends for any reason. It applies across nodes if the file system supports locks.
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
                f"{root} cannot be locked ({error.strerror}); make sure that no other process "
                "trains into it.",
                stacklevel=2,
            )
        yield
