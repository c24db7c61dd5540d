"""Running the command line inside the test's process."""

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from lit_diffusion.cli.main import main
from lit_diffusion.cli.options import (
    Parser,
    SamplingOptions,
    add_checkpoint,
    add_sampling,
    parse_sampling,
    sampling_options,
)

SCRIPT = str(Path(sys.executable).parent / "lit-diffusion")
"""The console script of the environment that the tests run in."""


def call(command: str) -> int:
    """Exit code of `lit-diffusion <command>`."""
    return main(shlex.split(command))


def sampling(options: str) -> SamplingOptions:
    """Options of `lit-diffusion sample --checkpoint run <options>`."""
    parser = Parser("sample")
    add_checkpoint(parser, required=True)
    add_sampling(parser)
    return sampling_options(parse_sampling(parser, ["--checkpoint", "run", *shlex.split(options)]))


def weights(root: str | Path) -> dict[str, torch.Tensor]:
    """Raw weights in the last checkpoint of a run."""
    return checkpoint(root)["state_dict"]


def checkpoint(root: str | Path) -> dict[str, Any]:
    return torch.load(Path(root) / "checkpoints" / "last.ckpt", weights_only=True)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
