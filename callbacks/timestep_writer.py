"""How a callback says which noise levels are trained: on the module, for the length of a batch."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_diffusion.protocols import HasTimesteps


class Timesteps(NamedTuple):
    """What `protocols.HasTimesteps` has.

    Attributes:
        timestep_density: (num_bins,) over u in [0, 1], unnormalised; None is uniform.
        timestep_weight: (num_bins,) factor on the loss; None is 1.
    """

    timestep_density: Tensor | None = None
    timestep_weight: Tensor | None = None


class TimestepWriter(Callback, ABC):
    """Sets the attributes `writes` of a module to what `timesteps_at` says, batch by batch.

    They are set from `on_train_batch_start` to `on_train_batch_end` and None at all other times:
    validation, sampling and a later fit see the module as it is. Each attribute has one writer; a
    density and a weight of two writers multiply.
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
        """Refuse modules that can't be told, and attributes with two writers."""
        name = type(self).__name__
        if not isinstance(pl_module, HasTimesteps):
            raise ValueError(
                f"{name} needs a module with the attributes timestep_density and timestep_weight "
                f"(protocols.HasTimesteps), and {type(pl_module).__name__} lacks them; set both to "
                "None in its __init__ and use them in its training_step."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, TimestepWriter) and other is not self:
                shared = " and ".join(sorted({*self.writes} & {*other.writes}))
                if shared:
                    raise ValueError(
                        f"{name} and {type(other).__name__} both set {shared}; remove one of them."
                    )
        self._refuse_another_hand(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set them."""
        self._refuse_another_hand(pl_module)
        step = trainer.global_step
        self._written = self.timesteps_at(step, pl_module.device)
        for attribute in self.writes:
            setattr(pl_module, attribute, getattr(self._written, attribute))
        if trainer._logger_connector.should_update_logs:  # as Lightning's own monitors do
            pl_module.log_dict(self.numbers_at(step, pl_module.device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take them off."""
        self._take_off(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take them off where a batch was skipped."""
        self._take_off(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take them off."""
        self._take_off(pl_module)

    def _take_off(self, module: LightningModule) -> None:
        """Set what this callback has set to None, and nothing else."""
        for attribute, value in self._written._asdict().items():
            if value is not None and getattr(module, attribute) is value:
                setattr(module, attribute, None)
        self._written = Timesteps()

    def _refuse_another_hand(self, module: LightningModule) -> None:
        """Raise ValueError where an attribute is set, and not by this callback."""
        for attribute in self.writes:
            found = getattr(module, attribute)
            if found is not None and found is not getattr(self._written, attribute):
                name = type(self).__name__
                raise ValueError(
                    f"{name} sets {attribute}, and something else has set it to a tensor of shape "
                    f"{tuple(found.shape)}; leave it None, or remove {name}."
                )
