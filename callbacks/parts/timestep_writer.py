"""How a callback says which noise levels are trained: on the module, for the length of a batch."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_diffusion.trainer_state import logs_are_due


class Timesteps(NamedTuple):
    """Values for the attributes of `protocols.HasTimesteps`."""

    timestep_density: Tensor | None = None
    timestep_weight: Tensor | None = None


class TimestepWriter(Callback, ABC):
    """Sets the attributes `writes` of a module to what `timesteps_at` says, batch by batch.

    Between training batches they are None. Each attribute has one writer; a density and a weight
    of two writers multiply.
    """

    writes: tuple[str, ...] = ()
    _written = Timesteps()

    @abstractmethod
    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """What to set after `step` optimizer steps, the same on all ranks."""

    @abstractmethod
    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """What to log."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse modules without the attributes, and attributes with two writers."""
        name = type(self).__name__
        if lacking := [a for a in self.writes if not hasattr(pl_module, a)]:
            raise ValueError(
                f"{name} needs a module with {' and '.join(self.writes)} (protocols.HasTimesteps), "
                f"and {type(pl_module).__name__} lacks {' and '.join(lacking)}; set it to None in "
                "its __init__ and use it in its training_step."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, TimestepWriter) and other is not self:
                shared = " and ".join(sorted({*self.writes} & {*other.writes}))
                if shared:
                    raise ValueError(
                        f"{name} and {type(other).__name__} both set {shared}; remove one of them."
                    )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Set them, unless somebody else has."""
        step = trainer.global_step
        written = self.timesteps_at(step, pl_module.device)
        for attribute in self.writes:
            found, name = getattr(pl_module, attribute), type(self).__name__
            if found is not None and found is not getattr(self._written, attribute):
                raise ValueError(
                    f"{name} sets {attribute}, and something else has set it to a tensor of shape "
                    f"{tuple(found.shape)}; leave it None, or remove {name}."
                )
            setattr(pl_module, attribute, getattr(written, attribute))
        self._written = written
        if logs_are_due(trainer):
            pl_module.log_dict(self.numbers_at(step, pl_module.device))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Take them off; at the end of a run where a batch was skipped or has failed."""
        for attribute, value in self._written._asdict().items():
            if value is not None and getattr(pl_module, attribute) is value:
                setattr(pl_module, attribute, None)
        self._written = Timesteps()

    on_train_batch_end = on_exception = on_train_end  # type: ignore[assignment]
