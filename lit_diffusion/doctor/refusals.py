"""What the callbacks of a config refuse, asked as the start of a fit would ask them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from lit_diffusion.doctor.extractors import Extractor
from lit_diffusion.doctor.machine import in_short
from lit_diffusion.doctor.rehearsal import Rehearsal, optimizers_of
from lit_diffusion.doctor.report import Finding, problem
from lit_diffusion.modules.diffusion import DiffusionModule

_OURS = "lit_diffusion.callbacks."

_ACTING = ("SaveOnSignal", "RankWatch")
"""Callbacks that do more at the start than look: they set handlers, or open connections."""


def check_callbacks(cli: Rehearsal, extractors: Sequence[Extractor]) -> Iterator[Finding]:
    """Whether a fit would begin with these callbacks, on this strategy and these optimizers.

    Asked are our own, which look and write nothing before training starts.

    Args:
        cli: what would be fitted.
        extractors: of the FIDs, whose faults are told already.
    """
    if cli.trainer is None:
        return
    try:
        optimizers = optimizers_of(cli.model)
    except Exception as error:  # that of somebody else may need a Trainer
        if isinstance(cli.model, DiffusionModule):
            yield problem("optimizer", str(error))
        return
    told = {extractor.fault for extractor in extractors}
    with _as_at_the_start(cli, optimizers):
        for callback in cli.callbacks:
            name = type(callback).__name__
            if not type(callback).__module__.startswith(_OURS) or name in _ACTING:
                continue
            refusal = _refusal(callback, cli)
            if refusal is not None and in_short(refusal) not in told:
                yield problem(name, str(refusal))


def _refusal(callback: Callback, cli: Rehearsal) -> Exception | None:
    """What the callback raises where a fit would begin."""
    assert cli.trainer is not None
    try:
        callback.setup(cli.trainer, cli.model, "fit")
        callback.on_fit_start(cli.trainer, cli.model)
    except Exception as error:  # a fit would end with it, whatever it is
        return error
    finally:
        callback.teardown(cli.trainer, cli.model, "fit")
    return None


@contextmanager
def _as_at_the_start(cli: Rehearsal, optimizers: list[Optimizer]) -> Iterator[None]:
    """Context in which the Trainer holds what it does when it calls the callbacks of a fit."""
    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    assert trainer is not None
    state = trainer.state.fn, trainer.state.status
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.optimizers = optimizers
    checkpoint = cli.request.checkpoint
    if checkpoint is not None and checkpoint.is_file():
        trainer.ckpt_path = str(checkpoint)
    try:
        yield
    finally:
        trainer.state.fn, trainer.state.status = state
        trainer.optimizers = []
        module.trainer = None
        if data is not None:
            data.trainer = None
