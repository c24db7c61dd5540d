"""What a module refuses: arguments that do not go together, losses that are not finite."""

import warnings

import torch
from torch import Tensor, nn

from lit_diffusion.protocols import Guidance, Loss, Parameterization, Process, Solver


def check_labels(
    num_classes: int | None, label_dropout: float, guidance: Guidance | None, network: nn.Module
) -> None:
    """Raise ValueError where labels are wanted and there are none, or others."""
    if not 0 <= label_dropout < 1:
        raise ValueError(f"label_dropout must be in [0, 1), got {label_dropout}.")
    if num_classes is None and (label_dropout > 0 or guidance is not None):
        raise ValueError(
            f"label_dropout={label_dropout} and guidance={guidance} need labels; pass num_classes."
        )
    if guidance is not None and label_dropout == 0:
        warnings.warn(
            f"{guidance} compares with the prediction without labels, which label_dropout=0 "
            "never trains.",
            stacklevel=4,
        )
    known = getattr(network, "num_classes", None)
    if known is not None and known != num_classes:
        raise ValueError(
            f"num_classes is {num_classes} in the module, but {known} in "
            f"{type(network).__name__}; change one of them."
        )


def check_objective(
    process: Process, parameterization: Parameterization, loss: Loss, solver: Solver
) -> None:
    """Raise ValueError where the network could not be trained, or sampled from, as it is asked."""
    ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    if not parameterization.gain(*process.alpha_sigma(ends)).isfinite().all():
        raise ValueError(
            f"{parameterization} can't recover x0 from pure noise, where {process} ends (SNR = 0); "
            "use Velocity or Sample."
        )
    loss.check(process, parameterization)
    if getattr(getattr(solver, "variance", None), "learned", False) and loss.output_factor != 2:
        raise ValueError(
            f"solver {solver} needs a learned variance, which {loss} does not train; use "
            "HybridLoss."
        )


def check_data(data: object, **ours: object) -> None:
    """Raise ValueError for a data module whose attributes of these names differ.

    Args:
        data: a data module, or None.
        **ours: values in the module; None fits everything.
    """
    for name, value in ours.items():
        theirs = getattr(data, name, None)
        if None not in (value, theirs) and value != theirs:
            raise ValueError(
                f"{name} is {value} in the module, but {theirs} in {type(data).__name__}; change "
                "one of them."
            )


class LossWatch:
    """Remembers the first loss that is not finite, on the device, so that nobody waits for it."""

    def __init__(self) -> None:
        self._first: Tensor | None = None  # (step, u); u is infinite while all is well

    def see(self, losses: Tensor, u: Tensor, step: int) -> None:
        """Note the losses (B,) at ranks u (B,) of optimizer step `step`."""
        least = u.masked_fill(losses.isfinite(), torch.inf).min()
        now = torch.stack([torch.full_like(least, step), least])
        first = now if self._first is None else self._first
        self._first = torch.where(first[1].isinf(), now, first)

    def first_bad(self) -> tuple[int, float] | None:
        """Step and u of the first loss that is not finite, if any; waits for the device."""
        if self._first is None or self._first[1].isinf():
            return None
        step, u = self._first.tolist()
        return int(step), u
