"""Settings that the Trainer takes, and that a fit then fails on or does not follow."""

from collections.abc import Iterator, Mapping
from typing import Any

from lit_diffusion.doctor.report import Finding, note, problem

_COUNTS = ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval")


def check_settings(settings: Mapping[str, Any], ckpt_path: str | None = None) -> Iterator[Finding]:
    """Numbers that Lightning divides by, and a checkpoint that no fit here knows.

    Args:
        settings: of the Trainer.
        ckpt_path: as the config has it.
    """
    for name in _COUNTS:
        value = settings[name]
        if isinstance(value, int) and value < 1:
            text = f"{name} must be at least 1, got {value}: Lightning divides by it."
            yield problem("trainer", text)
    if ckpt_path == "best":
        text = "--ckpt_path=best is known to no fit; name the file, such as best-fid.ckpt, or last."
        yield problem("resume", text)


def check_precision(wanted: object, given: str) -> Iterator[Finding]:
    """Whether the Trainer computes in the precision that it was asked for.

    Args:
        wanted: in the config.
        given: what the Trainer has made of it.
    """
    if str(wanted) == "16-mixed" != given:
        text = f"16-mixed is not for a CPU: the Trainer takes {given} here, and 16-mixed on a GPU."
        yield note("precision", text)
