"""Where, in one forward and backward pass, a number first was not finite."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class FirstNonFinite:
    """Watches the submodules of a module; a context, inside of which passes are seen.

    It waits for the device at each of them, and holds on to what they compute.

    Args:
        module: whose submodules are watched.

    Attributes:
        output: the submodule, with its class, that first returned something not finite, and
            whether that was so of its input or its weights before; None where all was finite.
        gradient: likewise for the backward pass.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softplus())
        >>> net.register_module("2", torch.nn.LogSigmoid())
        >>> with FirstNonFinite(net) as first:
        ...     seen = net(torch.tensor([torch.inf]))
        >>> first.output
        '0 (ReLU), whose input was not finite'
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = module.named_modules()
        self._names: dict[int, str] = {id(part): name for name, part in named if name}
        self._hooks: list[RemovableHandle] = []
        self._watched: dict[tuple[int, int], tuple[Tensor, list[tuple[bool, nn.Module]]]] = {}
        self._fine: set[int] = set()  # modules the gradient of whose output is finite
        self.output: str | None = None
        self.gradient: str | None = None

    def __enter__(self) -> "FirstNonFinite":
        """Begin to watch."""
        for part in self._module.modules():
            if id(part) in self._names:
                self._hooks.append(part.register_forward_pre_hook(self._before, with_kwargs=True))
                self._hooks.append(part.register_forward_hook(self._after, with_kwargs=True))
            for param in part.parameters(recurse=False):
                if param.requires_grad:
                    self._watch(param, part, is_output=False)
        return self

    def __exit__(self, *error: object) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched = [], {}

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            self._watch(tensor, part, is_output=False)

    def _after(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._watch(tensor, part, is_output=True)
        if self.output is None and not _finite(output):
            self.output = self._told(part)
            if not _finite((args, kwargs)):
                self.output += ", whose input was not finite"
            elif not _finite(list(part.parameters())):
                self.output += ", whose weights are not finite"

    def _watch(self, tensor: Tensor, part: nn.Module, *, is_output: bool) -> None:
        if not tensor.requires_grad:
            return
        key = id(tensor), tensor._version  # a change in place makes another value of it
        if key not in self._watched:
            self._watched[key] = tensor, []
            hook = partial(self._see_gradient, self._watched[key][1])
            self._hooks.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        self._watched[key][1].append((is_output, part))

    def _see_gradient(self, roles: list[tuple[bool, nn.Module]], gradient: Tensor) -> None:
        """A gradient with respect to the output of some modules, and the input of others."""
        if self.gradient is not None:
            return
        outputs = [part for is_output, part in roles if is_output]
        if gradient.isfinite().all():
            self._fine |= {id(part) for part in outputs}
            return
        spoilt = [part for is_output, part in roles if not is_output and id(part) in self._fine]
        if spoilt:
            self.gradient = self._told(max(spoilt, key=self._depth))
        elif outputs:
            self.gradient = f"what follows {self._told(outputs[-1])}"
        else:
            self.gradient = f"what uses the weights of {self._told(roles[0][1])}"

    def _depth(self, part: nn.Module) -> int:
        return self._names.get(id(part), "").count(".")

    def _told(self, part: nn.Module) -> str:
        name = self._names.get(id(part))
        return type(part).__name__ if name is None else f"{name} ({type(part).__name__})"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of real or complex numbers in a structure."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in _tensors(value))
