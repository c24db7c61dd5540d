"""A teacher for representation alignment: a copy of the network with averaged weights."""

from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lit_diffusion.auxiliary_losses.features import feature_grid, find_block
from lit_diffusion.callbacks.ema import ema_update_
from lit_diffusion.callbacks.trainer_state import eval_mode
from lit_diffusion.gaussian import expand_as
from lit_diffusion.protocols import NoisedBatch, check_positive


class _BlockOutput(Exception):
    """Ends a forward pass at a block, and holds the output of this block."""


def _stop(block: nn.Module, inputs: Any, output: Tensor) -> NoReturn:
    raise _BlockOutput(output)


class SelfTeacher(nn.Module):
    """Teacher of SRA: the EMA of the network, at a later block and a cleaner time.

    The teacher is a copy of the network. Its weights are an exponential moving average of the
    network's weights, and its buffers equal the network's buffers. Teacher and network get each
    image with the same noise and the same condition, but the noise level of the teacher is lower.
    Each image has a random number u in [0, 1). The time of the network is the quantile of
    `module.times` at u. The time of the teacher is the quantile at `max(u - k, 0)`, with k uniform
    in [0, max_interval) for each image. The paper subtracts k from the time itself, which is the
    same if times are uniform in [0, 1].

    The averaged weights are part of the state_dict, which makes a checkpoint larger by the size of
    the network. They are updated once after each optimizer step. In the first step of a new fit,
    the teacher equals the network. The forward pass of the teacher ends at `block`, runs in eval
    mode, and is not compiled. The average has the dtype of the weights. Therefore, use bf16-mixed
    instead of bf16-true, in which small updates would be rounded to 0.

    Args:
        block: name of the teacher's block, such as "blocks.19". For SiT-XL with 28 blocks, the code
            of the authors aligns the network's eighth block with the teacher's twentieth.
        decay: decay of the average per optimizer step, in [0, 1). The code of the authors uses
            0.9999.
        max_interval: upper limit of k, the difference between the network's u and the teacher's u,
            in [0, 1]. The code of the authors uses 0.2 with SiT.
        width: number of features of the teacher's block at each position. None means as many as in
            the aligned block of the network. This is right for a transformer, where all blocks have
            the same width.

    Raises:
        ValueError: if an argument is out of range, or if the network has no block of this name.

    Source: Jiang et al. 2025 (SRA, arXiv 2505.02831).

    Example:
        >>> from lit_diffusion.networks.dit import DiT
        >>> teacher = SelfTeacher("blocks.1", decay=0.99)
        >>> teacher.attach(DiT(8, 1, 1, depth=2, width=32, num_heads=2))
        >>> any(parameter.requires_grad for parameter in teacher.parameters())
        False
    """

    def __init__(
        self, block: str, decay: float = 0.9999, max_interval: float = 0.2, width: int | None = None
    ) -> None:
        super().__init__()
        check_positive(width=width)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}.")
        if not 0 <= max_interval <= 1:
            raise ValueError(f"max_interval must be in [0, 1], got {max_interval}.")
        self.block, self.width = block, width
        self.decay, self.max_interval = decay, max_interval
        self.network: nn.Module = nn.Identity()  # until `attach`
        self._step = 0  # the optimizer step after which the weights were averaged last

    def attach(self, network: nn.Module) -> None:
        """Copy the network. Raises ValueError if it has no such block."""
        self.network = deepcopy(network).requires_grad_(False)
        find_block(self.network, self.block).register_forward_hook(_stop)

    def get_extra_state(self) -> Tensor:
        """Return the optimizer step of the last average, for the state_dict."""
        return torch.tensor(self._step)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the optimizer step of the last average."""
        self._step = int(state)

    @torch.no_grad()
    def features(self, module: Any, batch: NoisedBatch) -> Tensor:
        """Return features (B, h, w, D). Also update the average weights once per optimizer step."""
        self._average(module.network, module.global_step)
        interval = self.max_interval * torch.rand_like(batch.u)
        t = module.times.quantile((batch.u - interval).clamp(min=0), module.process)
        alpha, sigma = (expand_as(scale, batch.x0) for scale in module.process.alpha_sigma(t))
        x_t = alpha * batch.x0 + sigma * batch.noise
        inputs = module.network_inputs(x_t, t, alpha, sigma, batch.condition)
        try:
            with eval_mode(self.network):
                self.network(*inputs)
        except _BlockOutput as reached:
            return feature_grid(reached.args[0], self.network)
        raise RuntimeError(f"block {self.block!r} has not run.")

    def _average(self, network: nn.Module, step: int) -> None:
        if step == self._step and step > 0:
            return
        decay = self.decay if step > 0 else 0.0  # weights may be loaded after `attach`
        ema_update_([*self.network.parameters()], [*network.parameters()], decay)
        for ours, theirs in zip(self.network.buffers(), network.buffers(), strict=True):
            ours.copy_(theirs)
        self._step = step
