"""What a person reads when a run ends in an error of Lightning's or torch's: which file, why."""

import traceback

from lightning.pytorch.cli import LightningCLI

from lit_diffusion.cli import changed_settings
from lit_diffusion.cli.run_folder import Request
from lit_diffusion.config.messages import is_user_error
from lit_diffusion.config.trust import is_within


def name_builder(error: BaseException) -> str:
    """Which class of ours could not be built, where an accident in its code does not tell."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    building = [f.f_locals.get("self") for f in frames if f.f_code.co_name == "__init__"]
    classes = [type(built) for built in building if not isinstance(built, LightningCLI)]
    names = [made.__name__ for made in classes if is_within(made.__module__, ["lit_diffusion"])]
    return f"{names[0]} cannot be built: " if names and not is_user_error(error) else ""


def explain(error: BaseException, request: Request, untrained: bool) -> ValueError | None:
    """What to say of a checkpoint or setting that torch or Lightning could not use, else None.

    An optimizer that fails while the weights are still those of the checkpoint, `untrained`, has a
    state that it cannot use.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    said, *reasons = str(error).split("\n")
    if said.startswith("Error(s) in loading state_dict"):
        details = " ".join(line.strip()[:200] for line in reasons[:3])
        return ValueError(
            f"{request.checkpoint} is of another architecture than the config: {details}"
        )
    # In these modules nothing is done but to restore what a checkpoint holds.
    restoring = ["lightning.pytorch.trainer.connectors.checkpoint_connector"]
    restoring += [changed_settings.__name__, *(["torch.optim"] if untrained else [])]
    if request.checkpoint is not None and any(is_within(name, restoring) for name in modules):
        if not is_user_error(error):
            said = (
                "it is damaged, or was saved with other callbacks, optimizers or versions "
                f"({type(error).__name__} in {frames[-1].f_code.co_qualname}: {said})."
            )
        elif changed_settings.__name__ in modules:
            return None
        return ValueError(f"{request.checkpoint} cannot be restored: {said}")
    if is_within(modules[-1], ["torch.optim"]) and is_user_error(error, ("torch",)):
        return ValueError(f"model.optimizer or model.lr_scheduler: {said}")
    return None
