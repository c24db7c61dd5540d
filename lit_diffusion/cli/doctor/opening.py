"""Whether a fit would get past its start: its data open, and no callback refuses the run."""

import warnings
from collections.abc import Collection, Iterator

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_diffusion import callbacks
from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
from lit_diffusion.cli.doctor.plan import num_images_in
from lit_diffusion.cli.doctor.rehearsal import Rehearsal
from lit_diffusion.cli.doctor.report import Finding, note, ok, problem, warning
from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.modules.diffusion import DiffusionModule

OURS = tuple(getattr(callbacks, name) for name in callbacks.__all__)
"""They look, and write nothing, before training starts."""

ACTING = (RankWatch, SaveOnSignal)
"""Those that do more than look: they open connections, or set handlers."""


def open_data(cli: Rehearsal) -> Iterator[Finding]:
    """Have the Trainer of a `started` fit open the data, if they are there: none is downloaded."""
    data = cli.datamodule
    awaited = data.awaited() if isinstance(data, ImageDataModule) else None
    if awaited and awaited.needs_network:
        text = f"{awaited.text}: fit fails on a node without a network; put it there before."
        yield warning("data", text)
    elif awaited:
        yield note("data", f"{awaited.text}.")
    else:
        try:
            yield _open(cli)
        except Exception as error:  # whatever a foreign data module may say
            fault = str(error) or type(error).__name__
            if isinstance(data, ImageDataModule | None) or not is_overridden("prepare_data", data):
                yield problem("data", fault)
            else:
                text = "not readable before prepare_data, which fit calls and this does not"
                yield warning("data", f"{text}: {fault}")
            return
    if isinstance(cli.model, DiffusionModule):
        try:
            cli.model.setup("fit")
        except ValueError as error:
            yield problem("data", str(error))


def _open(cli: Rehearsal) -> Finding:
    trainer, data = cli.trainer, cli.datamodule
    if data is not None:
        data.setup("fit")
    trainer.fit_loop.setup_data()
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    train, val = num_images_in(trainer.train_dataloader), num_images_in(trainer.val_dataloaders)
    if train is None:
        return note("data", "how many training images there are is not known.")
    return ok("data", f"{train:,} training images, {val or 0:,} held out")


def ask_callbacks(cli: Rehearsal, said: Collection[str] = ()) -> Iterator[Finding]:
    """Whether a `started` fit, its optimizers made, would begin; without refusals `said` before."""
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, OURS) or isinstance(callback, ACTING):
            continue
        name = type(callback).__name__
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            refusal = _refusal(callback, cli)
        if refusal is not None and str(refusal) not in said:
            yield problem(name, str(refusal))
        yield from (warning(name, text) for text in {str(each.message) for each in warned})


def _refusal(callback: Callback, cli: Rehearsal) -> Exception | None:
    try:
        callback.setup(cli.trainer, cli.model, "fit")
        callback.on_fit_start(cli.trainer, cli.model)
    except Exception as error:  # a fit would end with it, whatever it is
        return error
    finally:
        callback.teardown(cli.trainer, cli.model, "fit")
    return None
