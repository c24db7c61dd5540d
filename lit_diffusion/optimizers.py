"""MuonAdamW: Muon for the matrices of hidden layers, and AdamW for all other weights."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Muon for the matrices and convolution kernels of hidden layers, AdamW for all other weights.

    Muon averages the gradients G of a matrix, and replaces the singular values of the average by
    numbers near 1:

        B <- momentum * B + (1 - momentum) * G
        O = orthogonalize((1 - momentum) * G + momentum * B)
        W <- (1 - lr * weight_decay) * W - lr * scale * O

    `torch.optim.Muon` computes the update. It updates a convolution kernel (out, in, kh, kw) as the
    matrix (out, in * kh * kw), in any memory format. If one layer computes queries, keys and
    values, Muon updates its weight as one matrix and not as three.

    A hidden layer is a layer in a block of the network. The attribute `block_names` of a network
    lists its blocks. If the blocks begin with a convolution of the images, as in a U-Net, this
    convolution is not a hidden layer. Call `attach(network)` before the first step.
    `DiffusionModule` calls it for you.

    The optimizer has two param groups, Muon's and then AdamW's. A learning-rate schedule multiplies
    the lr of both. If `add_param_group` adds weights later, AdamW updates them.

    Under DDP, each rank updates all matrices. Under FSDP2, `attach` raises an error, because the
    matrices are split over ranks.

    Args:
        params: parameters to train.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW; None means `lr`.
        momentum: Nesterov momentum of Muon, in [0, 1).
        betas: decay rates of AdamW.
        eps: number that AdamW adds to the denominator.
        weight_decay: decoupled weight decay. Each step multiplies all weights by
            `1 - lr * weight_decay`, with the lr of their group.
        adjust_lr_fn: scale of Muon's update of a matrix (m, n). With "match_rms_adamw", the scale
            is `0.2 * sqrt(max(m, n))`. The root mean square of the update is then about `0.2 * lr`,
            as is typical of AdamW, so an lr that suits AdamW also suits Muon. With "original", the
            scale is `sqrt(max(1, m / n))`. The code of Jordan et al. has the scale 1 for a square
            convolution kernel, because it uses the height and width of the kernel as m and n.

    Raises:
        ValueError: if a number is out of range.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
        (kellerjordan.github.io/posts/muon). "match_rms_adamw" is from Liu et al. 2025 (Moonlight,
        arXiv 2502.16982), section 2.2.

    Example:
        >>> from lit_diffusion.networks.dit import DiT
        >>> network = DiT(8, in_channels=1, out_channels=1, depth=1, width=32, num_heads=2)
        >>> optimizer = MuonAdamW(network.parameters(), lr=1e-3)
        >>> optimizer.attach(network)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [5, 15]
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    ) -> None:
        params = list(params)
        muon = Muon(
            [torch.zeros(1, 1)],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn=adjust_lr_fn,
        )
        adamw_lr = lr if adamw_lr is None else adamw_lr
        adamw = AdamW(params, lr=adamw_lr, betas=betas, eps=eps, weight_decay=weight_decay)
        groups = [{"params": [], **muon.defaults}, {"params": params, **adamw.defaults}]
        super().__init__(groups, defaults={})
        self.defaults = adamw.defaults

    def attach(self, module: nn.Module) -> None:
        """Assign the matrices of hidden layers to Muon.

        Args:
            module: the network, or a module that contains it.

        Raises:
            ValueError: if the optimizer has no matrix of a hidden layer, for example because no
                network in the module lists its blocks. The error is also raised if matrices are
                split over ranks.
        """
        hidden = {id(weight) for weight in hidden_matrices(module)}
        muon, adamw = self.param_groups[:2]
        params = [*muon["params"], *adamw["params"]]
        muon["params"] = [param for param in params if id(param) in hidden]
        adamw["params"] = [param for param in params if id(param) not in hidden]
        if not muon["params"]:
            raise ValueError(
                f"MuonAdamW must train a matrix in a hidden layer, but {type(module).__name__} has "
                "none in its blocks; list the blocks in an attribute block_names, or use AdamW."
            )
        if any(isinstance(matrix, DTensor) for matrix in muon["params"]):
            raise ValueError(
                "MuonAdamW needs whole matrices, but they are split over ranks; use "
                "strategy='ddp', or AdamW with ModelParallelStrategy."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights.

        Args:
            closure: None, or a function that computes the gradients and returns the loss.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: if `attach` has not been called.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, *others = self.param_groups
        if not muon["params"]:
            raise RuntimeError("MuonAdamW does not know the hidden layers; call attach(network).")
        self._step_muon(muon)
        adamw = AdamW([dict(group) for group in others])
        adamw.state = self.state
        adamw.step()
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        # Views of the weights. In other memory formats, kernels are copied.
        matrices = [weight.flatten(1) for weight in weights]
        for weight, matrix in zip(weights, matrices, strict=True):
            matrix.grad = weight.grad.flatten(1)
        muon = Muon([{**group, "params": matrices}])
        for weight, matrix in zip(weights, matrices, strict=True):
            muon.state[matrix] = self.state[weight]  # the same dict, so that Muon fills it
        muon.step()  # type: ignore[no-untyped-call]
        for weight, matrix in zip(weights, matrices, strict=True):
            if not weight.is_contiguous():
                weight.copy_(matrix.view_as(weight))


def hidden_matrices(module: nn.Module) -> list[Tensor]:
    """List the weights with two or more dimensions in the blocks of a module's networks.

    The networks are the submodules that have an attribute `block_names`, and the module itself if
    it has this attribute. If the blocks of a network begin with a convolution of the images, as in
    a U-Net, the kernel of this convolution is left out.

    Example:
        >>> from lit_diffusion.networks.unet import UNet
        >>> network = UNet(in_channels=1, out_channels=1, model_channels=32)
        >>> hidden_matrices(network)[0] is network.input_blocks[1][0].in_layers[2].weight
        True
    """
    hidden: list[Tensor] = []
    for network in module.modules():
        blocks = [network.get_submodule(name) for name in getattr(network, "block_names", ())]
        params = [param for block in blocks for param in block.parameters() if param.ndim >= 2]
        first = [*params[0].shape] if params else []
        starts_with_images = len(first) == 4 and first[1] == getattr(network, "in_channels", None)
        hidden += params[1:] if starts_with_images else params
    return hidden
