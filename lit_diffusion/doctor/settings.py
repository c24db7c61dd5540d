"""Settings that the Trainer takes, and that a fit then fails on or does not follow."""

from collections.abc import Iterator, Mapping
from typing import Any

from lit_diffusion.commands.trainer_settings import unknown_checkpoint, wrong_settings
from lit_diffusion.doctor.report import Finding, note, problem


def check_settings(settings: Mapping[str, Any], ckpt_path: str | None = None) -> Iterator[Finding]:
    """What a fit would refuse.

    Args:
        settings: of the Trainer.
        ckpt_path: as the config has it.
    """
    yield from (problem("trainer", text) for text in wrong_settings(settings))
    yield from (problem("resume", text) for text in unknown_checkpoint(ckpt_path))


def check_precision(wanted: object, given: str) -> Iterator[Finding]:
    """Whether the Trainer computes in the precision that it was asked for.

    Args:
        wanted: in the config.
        given: what the Trainer has made of it.
    """
    if str(wanted) == "16-mixed" != given:
        text = f"16-mixed is not for a CPU: the Trainer takes {given} here, and 16-mixed on a GPU."
        yield note("precision", text)
