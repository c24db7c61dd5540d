"""Options of an optimizer, such as its lr, that are others during an update and only then."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lit_diffusion.sharding import is_made_up

ParamGroup = dict[str, Any]
_OF_TORCH = ("state", "param_groups", "defaults")  # large, and without optimizers


class UpdateOptions:
    """Gives the param groups of an optimizer other options in each update, and takes them back.

    Whoever looks between updates sees the optimizer's own options: lr schedulers and warm-up, which
    compute the next lr from the present one, monitors, checkpoints. So does a closure that the step
    runs, as Lightning's is with the training step in it, and a `state_dict` taken at any time.

    Args:
        optimizer: changed in its `step()`.
        options: a param group -> the entries that the update sees instead; called with the group's
            own options in place.

    Raises:
        ValueError: the optimizer's steps can't be hooked, as `refuse_unhookable` says.

    Attributes:
        in_force: the options, own and other, of each group in the last update; empty before.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> sgd = torch.optim.SGD([weight], lr=0.5)
        >>> half = UpdateOptions(sgd, lambda group: {"lr": group["lr"] / 2})
        >>> sgd.step()
        >>> weight.item(), half.in_force[0]["lr"], sgd.param_groups[0]["lr"]
        (0.75, 0.25, 0.5)
        >>> half.release()
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

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_made_up(optimizer, kwargs):
            return args, kwargs
        self._put()  # before the closure too: some optimizers read options before they call it
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._outside(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], self._outside(args[1]), *args[2:]), kwargs
        return args, kwargs

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, run with the own options in place."""

        def run() -> Any:
            self.restore()
            result = closure()
            self._put()
            return result

        return run

    def _after(self, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        if is_made_up(optimizer, kwargs):
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


def refuse_unhookable(optimizer: object) -> None:
    """Raise ValueError where hooks on `step()` would not run, or where updates would not follow.

    A wrapper, as DeepSpeed's are, steps another optimizer inside; a captured graph repeats the
    options that it was captured with; a compiled step is compiled anew for each change.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not _runs_hooks(optimizer):
        raise ValueError(
            "Options that change with each update need a torch.optim.Optimizer whose step() runs "
            f"hooks; {name} is something else, or hides one inside. Return torch's own optimizer "
            "from configure_optimizers, and use a strategy such as 'ddp' that leaves it as it is."
        )
    if inside := _hidden(optimizer):
        raise ValueError(
            f"{name} holds another optimizer, {type(inside[0]).__name__}, with param groups of its "
            f"own, whose updates the options of {name} do not reach; let {name} take the groups of "
            "the inner one (self.param_groups = inner.param_groups, in __init__ and at the end of "
            "load_state_dict), or return the inner one from configure_optimizers."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            "A captured graph repeats the options that it was captured with, so they can't change "
            f"with each update; {name} has capturable=True, pass capturable=False."
        )
    if _is_compiled(optimizer.step):
        raise ValueError(
            "A compiled step is compiled anew for each change of its options, and they change with "
            f"each update; leave {name}.step as it is, without torch.compile."
        )


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Whether Optimizer.__init__ has made the hooks, and the class's step the one that runs them.

    A wrapper that calls itself an Optimizer often leaves that out.
    """
    has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks")
    return has_hooks and getattr(type(optimizer).step, "hooked", False)


def _hidden(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers inside with param groups of their own, as many a Lookahead has.

    ZeroRedundancyOptimizer has one too, and gives it the options in each step.
    """
    if _is_zero_redundancy(optimizer):
        return []
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    outer = {id(group) for group in optimizer.param_groups}
    return [x for x in _optimizers_in(own) if outer.isdisjoint(map(id, x.param_groups))]


def _optimizers_in(value: object) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from _optimizers_in(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _optimizers_in(item)


def _is_zero_redundancy(optimizer: Optimizer) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return isinstance(optimizer, ZeroRedundancyOptimizer)


def _is_compiled(step: Callable[..., Any]) -> bool:
    def marked(function: Callable[..., Any]) -> bool:
        # The first torch.compile in a process wraps the steps of LBFGS and SparseAdam to keep them
        # out of it.
        kept_out = getattr(function, "_torchdynamo_disable", False)
        return hasattr(function, "_torchdynamo_orig_callable") and not kept_out

    return marked(inspect.unwrap(step, stop=marked))
