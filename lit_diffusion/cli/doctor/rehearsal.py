"""A fit up to the moment before its first batch: all of it built, and its Trainer ready to ask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lit_diffusion.cli.doctor.ranks import Ranks
from lit_diffusion.cli.lightning_internals import attach_data
from lit_diffusion.cli.trainer_cli import RunCLI
from lit_diffusion.config.messages import innermost


class Rehearsal(RunCLI):
    """Parses and builds all that a fit would, and stops there. Writes nothing.

    Where the Trainer refuses its settings, as without the GPU that they name, one of as many
    processes on the CPU stands in, so that the rest can still be looked at.
    """

    refusal: str | None = None  # what the Trainer says against its settings
    was_trial = False  # whether the config asks for fast_dev_run; what is built is the run without

    def before_instantiate_classes(self) -> None:
        """A folder that holds another run is a finding and no error here."""
        self.was_trial = self.is_trial
        self.value_of(self.config, "trainer").fast_dev_run = False

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, or the one that stands in."""
        try:
            return super().instantiate_trainer(**kwargs)
        except Exception as error:  # Lightning has no common class for them
            self.refusal = innermost(error)
        asked = self.value_of(self.config_init, "trainer")
        asked.accelerator, asked.strategy, asked.precision = "cpu", "auto", "32-true"
        asked.devices = self.ranks().devices or 1
        asked.plugins = [LightningEnvironment()]  # whatever the launcher here
        return super().instantiate_trainer(**kwargs)

    def run_trainer(self, run: object) -> None:
        """Nothing."""

    def ranks(self) -> Ranks:
        """Processes that the config asks for."""
        if self.refusal is None:
            return Ranks(self.trainer.num_devices, self.trainer.num_nodes)
        asked = self.dumped()["trainer"]
        devices = asked["devices"]
        number = len(devices) if isinstance(devices, list) else str(devices)
        return Ranks(int(number) if str(number).isdigit() else None, asked["num_nodes"])


@contextmanager
def started(cli: Rehearsal) -> Iterator[None]:
    """Context in which the Trainer holds what it does when a fit calls the hooks of its start."""
    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    state = trainer.state.fn, trainer.state.status
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    if trainer.max_epochs is None:  # as Lightning resolves it
        ends = trainer.max_steps != -1 or is_timed(trainer)
        trainer.fit_loop.max_epochs = -1 if ends else 1000
    trainer.strategy.connect(module)
    attach_data(trainer, module, data)
    if (checkpoint := cli.request.checkpoint) is not None:
        trainer.ckpt_path = str(checkpoint)
    try:
        yield
    finally:
        trainer.fit_loop.teardown()
        trainer.state.fn, trainer.state.status = state
        trainer.optimizers = []
        module.trainer = None
        if data is not None:
            data.trainer = None


def is_timed(trainer: Trainer) -> bool:
    """Whether the run also ends after a time."""
    return any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]
