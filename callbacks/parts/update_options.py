"""Options of an optimizer, such as its lr, that are others during an update and only then."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lit_diffusion.callbacks.trainer_state import is_state_init_step

ParamGroup = dict[str, Any]


class UpdateOptions:
    """Gives the param groups of an optimizer other options in each update, and takes them back.

    Whoever looks between updates sees the optimizer's own options: lr schedules, monitors,
    checkpoints; so do a closure that the step runs, and a `state_dict` taken at any time.

    Args:
        optimizer: changed in its `step()`.
        options: a param group -> the entries that the update sees instead; called with the group's
            own options in place.

    Attributes:
        in_force: the options, own and other, of each group in the last update; empty before.
    """

    def __init__(
        self, optimizer: Optimizer, options: Callable[[ParamGroup], dict[str, Any]]
    ) -> None:
        refuse_unhookable(optimizer)
        self._optimizer = optimizer
        self._options = options
        self._own: list[tuple[ParamGroup, dict[str, Any]]] = []  # what to put back, and where
        self.in_force: list[dict[str, Any]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_post_hook(self._show_own),
        ]

    def restore(self) -> None:
        """Put the own options back; for a step that was left by an exception."""
        for group, own in self._own:
            group.update(own)
        self._own = []

    def release(self) -> None:
        """Put the own options back and let go of the optimizer."""
        self.restore()
        for hook in self._hooks:
            hook.remove()

    def _put(self) -> None:
        self.restore()
        for group in self._optimizer.param_groups:
            others = self._options(group)
            self._own.append((group, {name: group[name] for name in others}))
            group.update(others)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_state_init_step(optimizer, kwargs):
            return None
        self._put()  # before the closure too: some optimizers read options before they call it
        if kwargs.get("closure") is None:
            return None
        return args, {**kwargs, "closure": self._outside(kwargs["closure"])}

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self.restore()
            result = closure()
            self._put()
            return result

        return run

    def _after(self, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        if is_state_init_step(optimizer, kwargs):
            return
        self.in_force = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.restore()

    def _show_own(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        own = {id(group): options for group, options in self._own}
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            packed.update(own.get(id(group), {}))


def refuse_unhookable(optimizer: Optimizer) -> None:
    """Raise ValueError where hooks on `step()` would not run, or where updates would not follow."""
    name = type(optimizer).__name__
    refuse_unhooked(optimizer)
    if inside := _hidden(optimizer):
        raise ValueError(
            f"{name} holds another optimizer, {type(inside[0]).__name__}, with param groups of its "
            f"own, which the options of {name} do not reach; let both have the same groups, also "
            "after load_state_dict, or return the inner one from configure_optimizers."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            "A captured graph repeats the options that it was captured with, so they can't change "
            f"with each update; {name} has capturable=True, pass capturable=False."
        )


def refuse_unhooked(optimizer: object) -> None:
    """Raise ValueError where hooks on `step()` would not run."""
    # What torch marks in Optimizer.__init__, which some that hold another optimizer do not call.
    hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
    if not (hooked and isinstance(optimizer, Optimizer)):
        raise ValueError(
            "Only a torch.optim.Optimizer whose step() runs hooks can be followed; "
            f"{type(optimizer).__name__} is something else, or has not called "
            "Optimizer.__init__. Return torch's own optimizer, or the one inside, and use a "
            "strategy such as 'ddp' that leaves it as it is."
        )


def _hidden(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers inside with param groups of their own, as a Lookahead has."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):  # gives its own the options in each step
        return []
    own = {name: value for name, value in vars(optimizer).items() if name != "state"}  # is large
    inside = [
        leaf for value in own.values() for leaf in _leaves(value) if isinstance(leaf, Optimizer)
    ]
    outer = {id(group) for group in optimizer.param_groups}
    return [x for x in inside if outer.isdisjoint(map(id, x.param_groups))]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _leaves([*value.values()])
    parts = value if isinstance(value, list | tuple) else ()
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [value]
