"""Group norm, scale and shift, and SiLU as one operation.

    y = silu((1 + scale) * (weight * (x + offset - mean) / std + bias) + shift)

Here, mean and std are the mean and standard deviation of `x + offset` in each group of channels.
Under autocast, separate operations for this formula would read and write the activations many
times. They would also copy the activations to float32 and, on CUDA, convert channels_last to the
contiguous format. There are two implementations:

- On CUDA, `fused_norm_triton` has one Triton kernel for the forward pass and one for the backward
  pass. Networks compiled with `torch.compile` use these kernels too.
- In all other cases, `separate_group_norm_silu` calls torch's operations, which `torch.compile` can
  fuse. These cases include the CPU, float64, forward-mode differentiation, second derivatives, and
  GPUs without Triton or without support of bfloat16.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    num_groups: int,
    eps: float,
    silu: bool = True,
) -> Tensor:
    """Apply group norm with statistics in float32 or better, then scale and shift, then SiLU.

    The tensors other than x may have any floating-point dtype.

    Args:
        x: (B, C, ...), contiguous or in channels_last format.
        weight: (C,) weight of the norm.
        bias: (C,) bias of the norm.
        scale: (B, C). The output of the norm is multiplied by `1 + scale`. None means no scale and
            no shift.
        shift: (B, C), added after the multiplication; None if `scale` is None.
        offset: (B, C), added to x before the norm; None for no offset.
        num_groups: number of groups, which divides C.
        eps: number added to the variance.
        silu: whether to apply SiLU.

    Returns:
        (B, C, ...) in the dtype and memory format of x. On CUDA without the Triton kernels, the
        result has the dtype of x, but is contiguous.

    Source: Wu & He 2018, Eq. 1 and 7. Scale and shift are from Nichol & Dhariwal 2021, appendix A.
    """
    arguments = (x, weight, bias, scale, shift, offset, num_groups, eps, silu)
    if _has_kernels(x.device, x.dtype) and (
        torch.compiler.is_compiling() or not _is_transformed(*arguments[:6])
    ):
        from lit_diffusion.networks.fused_norm_triton import GroupNormSiLU

        # The kernels expect a row per image, and a stride of 1 between channels of weight and bias.
        rows = (t if t is None else t.expand(x.shape[:2]) for t in (scale, shift, offset))
        affine = (weight.contiguous(), bias.contiguous())
        return GroupNormSiLU.apply(x, *affine, *rows, num_groups, eps, silu)
    return separate_group_norm_silu(*arguments)


def separate_group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    num_groups: int,
    eps: float,
    silu: bool,
) -> Tensor:
    """Compute `group_norm_silu` with torch's operations.

    Each operation rounds its result to the dtype of x, whereas the Triton kernel rounds only once.
    """
    if offset is not None:
        x = x + _per_channel(offset.to(x.dtype), x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    h = F.group_norm(x.to(dtype), num_groups, weight.to(dtype), bias.to(dtype), eps).to(x.dtype)
    if scale is not None and shift is not None:
        scale, shift = (_per_channel(t.to(x.dtype), x) for t in (scale, shift))
        h = torch.addcmul(shift, h, 1 + scale)
    return F.silu(h) if silu else h


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """(B, C) -> (B, C, 1, ...), to be broadcast over x."""
    return values.view(*values.shape, *[1] * (x.ndim - 2))


def _is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor has a forward-mode tangent, or a transform of `torch.func` is active."""
    if torch._C._are_functorch_transforms_active():
        return True
    duals = [unpack_dual(t) for t in tensors if t is not None]  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `fused_norm_triton` supports this device and dtype."""
    return device.type == "cuda" and dtype != torch.float64 and _import_kernels(device)


@cache
def _import_kernels(device: torch.device) -> bool:
    """Whether Triton is installed, and the GPU supports bfloat16."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from lit_diffusion.networks import fused_norm_triton  # noqa: F401
    except ImportError:
        return False
    return True
