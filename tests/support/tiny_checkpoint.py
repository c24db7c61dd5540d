"""Checkpoints of a tiny module, and one whose weights are split."""

import torch
from torch import nn

from support.tiny_run import TinyModule, TinyNet

DECAYS = (0.5, 0.25)


def checkpoint_of(module: nn.Module, **more) -> dict:
    """As a fit with EMA of two decays leaves it; each average differs from all else."""
    state = {name: torch.full_like(value, 1.0) for name, value in module.state_dict().items()}
    shadows = [{name: torch.full_like(v, 2.0 + i) for name, v in state.items()} for i in range(2)]
    ema = {"decays": list(DECAYS), "steps": dict.fromkeys(state, 7), "shadows": shadows}
    return {
        "state_dict": state,
        "global_step": 7,
        "callbacks": {"EMA{'prefix': ''}": ema, "Other": {"best": 1}},
        **more,
    }


def tiny(width: int = 3) -> TinyModule:
    return TinyModule(TinyNet(width), torch.optim.Adam)
