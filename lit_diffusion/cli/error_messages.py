"""Errors of Lightning and torch in words that name the file or the setting that caused them."""

import traceback

from lightning.pytorch.cli import LightningCLI

from lit_diffusion.cli import changed_settings
from lit_diffusion.cli.run_folder import Request
from lit_diffusion.config.messages import is_user_error
from lit_diffusion.config.trust import is_within


def failed_class(error: BaseException) -> str:
    """The text "UNet cannot be built: " for an accident in a constructor of this library, else "".

    A message that a check raised on purpose needs no such beginning.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if is_user_error(error):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = type(frame.f_locals.get("self"))
        is_ours = is_within(kind.__module__, ["lit_diffusion"])
        in_constructor = frame.f_code.co_name == "__init__" and not issubclass(kind, LightningCLI)
        if is_ours and in_constructor:
            return f"{kind.__name__} cannot be built: "
    return ""


def explain(error: BaseException, request: Request, untrained: bool) -> ValueError | None:
    """A readable error for a checkpoint or setting that torch or Lightning could not use, or None.

    Args:
        error: that ended a run.
        request: the command line.
        untrained: whether the weights are still those of the checkpoint. An optimizer that fails
            then has a state that it cannot use.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    message, *reasons = str(error).split("\n")
    if message.startswith("Error(s) in loading state_dict"):
        details = " ".join(line.strip()[:200] for line in reasons[:3])
        return ValueError(
            f"{request.checkpoint} is of another architecture than the config: {details}"
        )
    # These modules do nothing but restore what a checkpoint holds.
    restoring = ["lightning.pytorch.trainer.connectors.checkpoint_connector"]
    restoring += [changed_settings.__name__, *(["torch.optim"] if untrained else [])]
    if request.checkpoint is not None and any(is_within(name, restoring) for name in modules):
        if not is_user_error(error):
            message = (
                "it is damaged, or was saved with other callbacks, optimizers or versions "
                f"({type(error).__name__} in {frames[-1].f_code.co_qualname}: {message})."
            )
        elif changed_settings.__name__ in modules:
            return None
        return ValueError(f"{request.checkpoint} cannot be restored: {message}")
    if is_within(modules[-1], ["torch.optim"]) and is_user_error(error, ("torch",)):
        return ValueError(f"model.optimizer or model.lr_scheduler: {message}")
    return None
