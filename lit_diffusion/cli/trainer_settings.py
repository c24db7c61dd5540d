"""Settings that Lightning's Trainer takes, and that a run then fails on far from their cause."""

from collections.abc import Iterator, Mapping
from typing import Any


def wrong_settings(trainer: Mapping[str, Any], ckpt_path: str | None = None) -> Iterator[str]:
    """What is wrong with each."""
    if trainer.get("max_steps", -1) is None:
        yield "trainer.max_steps must be a number, -1 for no end, got null."
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval"):
        value = trainer.get(name)
        if isinstance(value, int) and value < 1:
            counts = " where it counts batches" if name == "val_check_interval" else ""
            yield f"trainer.{name} must be at least 1{counts}, got {value}."
    if ckpt_path == "best":  # which Lightning knows
        yield (
            "ckpt_path=best is known to no run here; name the file, such as "
            "checkpoints/best-fid.ckpt in the run folder, or last."
        )
