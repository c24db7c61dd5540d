"""A small experiment, its arms, and finished runs of them."""

import io
import shlex
from contextlib import chdir, redirect_stdout
from pathlib import Path

from lit_diffusion.cli.main import main
from support.commands import call
from support.tiny_run import EMA, tiny_config, write_config

TRUST = "--trust support"
ARMS = {
    "slow": {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.01}}}}},
    "ema": {"trainer": {"callbacks+": [EMA]}},
}


def write_configs() -> None:
    """tiny.yaml and its arms slow.yaml and ema.yaml."""
    write_config(tiny_config())
    for name, arm in ARMS.items():
        write_config(arm, Path(f"{name}.yaml"))


def sweep_into(folder: Path) -> Path:
    """The finished runs of the arms baseline and slow."""
    text = io.StringIO()
    with chdir(folder):
        write_config(tiny_config())
        write_config(ARMS["slow"], Path("slow.yaml"))
        with redirect_stdout(text):
            main(
                shlex.split(f"sweep tiny.yaml --arms slow.yaml --seeds 0 --out out --print {TRUST}")
            )
        for line in text.getvalue().splitlines():
            assert main(shlex.split(line)[1:]) == 0
    return folder / "out"


def printed(capsys, options: str) -> list[str]:
    assert call(f"sweep tiny.yaml {options} --print {TRUST}") == 0
    return capsys.readouterr().out.splitlines()


def refusal(capsys, options: str, config: str = "tiny.yaml") -> str:
    """What is said of a sweep that is refused before anything is started."""
    before = sorted(Path().rglob("*"))
    assert call(f"sweep {config} {options} {TRUST}") == 2
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().err
