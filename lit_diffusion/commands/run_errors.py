"""What a person reads when a run ends in an error of Lightning's or torch's: which file, why."""

import traceback

from lit_diffusion.cli import is_meant
from lit_diffusion.commands.run_folder import Request
from lit_diffusion.trust import within

_CHANGING_SETTINGS = "lit_diffusion.commands.resume"
_RESTORING = (
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    _CHANGING_SETTINGS,
)
"""Modules in which nothing is done but to restore what a checkpoint holds."""


def builder(error: BaseException) -> str:
    """Which class of ours could not be built, where an accident in its code does not tell."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    building = [f for f in frames if f.f_code.co_name == "__init__" and "self" in f.f_locals]
    ours = [type(f.f_locals["self"]).__module__.split(".")[0] == "lit_diffusion" for f in building]
    names = [
        type(f.f_locals["self"]).__name__ for f, own in zip(building, ours, strict=True) if own
    ]
    names = [name for name in names if name != "RunCLI"]
    return f"{names[0]} cannot be built: " if names and not is_meant(error) else ""


def explained(error: BaseException, request: Request, untrained: bool) -> ValueError | None:
    """What to say of a checkpoint or setting that torch or Lightning could not use, else None.

    Args:
        error: that ended the Trainer.
        request: what it was to do.
        untrained: whether the weights are still those of the checkpoint; an optimizer that fails
            then has a state that it cannot use.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    said = str(error).split("\n")[0]
    if said.startswith("Error(s) in loading state_dict"):
        return ValueError(_architecture(error, request))
    restoring = (*_RESTORING, *(("torch.optim",) if untrained else ()))
    if request.checkpoint is not None and any(within(name, restoring) for name in modules):
        if is_meant(error) and _CHANGING_SETTINGS in modules:
            return None
        if is_meant(error):
            return ValueError(f"{request.checkpoint} cannot be restored: {said}")
        return ValueError(
            f"{request.checkpoint} cannot be restored: it is damaged, or was saved with other "
            f"callbacks, optimizers or versions ({type(error).__name__} in "
            f"{frames[-1].f_code.co_qualname}: {said})."
        )
    if within(modules[-1], ["torch.optim"]) and is_meant(error, ("torch",)):
        return ValueError(f"model.optimizer or model.lr_scheduler: {said}")
    return None


def _architecture(error: BaseException, request: Request) -> str:
    reasons = [line.strip()[:200] for line in str(error).split("\n")[1:4]]
    return f"{request.checkpoint} is of another architecture than the config: {' '.join(reasons)}"
