"""A module's own weights, kept while others are in their place."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_diffusion.callbacks.parts.averages import overwrite_
from lit_diffusion.system.sharding import reshard


class RawWeights:
    """Copies of parameters that are about to be overwritten, and the way back.

    While anything is kept, `module.state_dict()` shows the copies: every checkpoint, full or
    weights-only, whoever saves it, gets the raw weights.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._module: nn.Module | None = None
        self._hook: RemovableHandle | None = None

    @torch.no_grad()
    def keep(self, module: nn.Module, params: Iterable[Tensor]) -> None:
        """Copy the parameters, in their own dtype, before they are overwritten."""
        self._module = module
        reshard(module)
        self._copies |= {p: p.detach().clone() for p in params}
        register: Any = module.register_state_dict_post_hook
        self._hook = register(partial(self._show))  # which torch puts a mark on

    def put_back(self) -> None:
        """Write the copies back and drop them; after an interruption at any instant, once more."""
        if self._copies:
            assert self._module is not None
            reshard(self._module)
            overwrite_(list(self._copies), list(self._copies.values()))
        self._copies.clear()
        if self._hook is not None:
            self._hook.remove()

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, param in module.named_parameters(remove_duplicate=False):
            if param in self._copies and prefix + name in state:
                state[prefix + name] = self._copies[param]
