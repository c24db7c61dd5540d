"""What averages of weights are in a checkpoint, looked at before any is used.

`callbacks/averages.py` writes it; `callbacks/ema.py` resumes from it, `checkpoints.py` loads it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_diffusion.checkpoint_checks import is_dense


def check_averages(state: Any) -> None:
    """Refuse what no EMA callback saves.

    Args:
        state: {} or {"decays": [float], "steps": {name: int}, "shadows": one {name: Tensor} for
            each decay}.

    Raises:
        ValueError: says what is wrong, without the file's name.

    Example:
        >>> check_averages({"decays": [0.9], "steps": {"w": 1}, "shadows": [{"w": Tensor([0.0])}]})
    """
    if isinstance(state, dict) and not state:
        return
    if not (isinstance(state, dict) and {"decays", "steps", "shadows"} <= state.keys()):
        raise ValueError("it must hold decays, steps and shadows")
    decays, steps, shadows = state["decays"], state["steps"], state["shadows"]
    if not (isinstance(decays, list | tuple) and decays and all(map(_is_decay, decays))):
        raise ValueError(f"its decays must be numbers in [0, 1), and are {decays!r:.50}")
    if not (isinstance(steps, dict) and all(map(_is_count, steps.values()))):
        raise ValueError(f"its steps must be counts by name, and are {steps!r:.50}")
    if not (isinstance(shadows, list | tuple) and len(shadows) == len(decays)):
        raise ValueError("it must hold averages for each decay")
    for shadow in shadows:
        _check_shadow(shadow, steps, shadows[0])


def _check_shadow(shadow: Any, steps: Mapping[str, int], first: Mapping[str, Tensor]) -> None:
    if not (isinstance(shadow, dict) and shadow.keys() == steps.keys()):
        raise ValueError("it must hold an average of each parameter, by each decay")
    for name, value in shadow.items():
        if not (is_dense(value) and (value.is_floating_point() or value.is_complex())):
            raise ValueError(f"its average of {name} is not of real numbers")
        if value.shape != first[name].shape:
            raise ValueError(f"its averages of {name} differ in shape")


def _is_decay(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
