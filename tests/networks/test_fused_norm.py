"""Group norm with scale, shift and SiLU: each way to compute it against its formula in float64.

The Triton kernels run on a GPU, or on the CPU in Triton's interpreter, which must be switched on
before Triton is imported: a test runs this file again with it.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from lit_diffusion import networks
from lit_diffusion.networks import fused_norm
from lit_diffusion.networks.fused_norm import group_norm_silu, separate_group_norm_silu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS = 1e-4  # not torch's default
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Of the norm of an error: a few roundings of float32, and one of the output's dtype."""


def formula(x, weight, bias, scale, shift, offset, num_groups, eps, silu):
    if offset is not None:
        x = x + offset.reshape(*offset.shape, *[1] * (x.ndim - 2))
    grouped = x.reshape(len(x), num_groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    normalised = centred / (centred.square().mean(2, keepdim=True) + eps).sqrt()
    rows = [t.reshape(*t.shape, *[1] * (x.ndim - 2)) for t in (weight[None], bias[None])]
    z = normalised.reshape(x.shape) * rows[0] + rows[1]
    if scale is not None:
        scale, shift = (t.reshape(*t.shape, *[1] * (x.ndim - 2)) for t in (scale, shift))
        z = z * (1 + scale) + shift
    return z / (1 + torch.exp(-z)) if silu else z


def inputs(shape, dtype=torch.float64, *, channels_last=False, device="cpu", seed=0):
    """x, weight, bias, offset, (scale, shift) in one tensor; and a gradient of the output.

    x has another mean and size in each channel; weights are in float32 at least, as under autocast.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    batch, channels, *pixels = shape
    per_channel = (1, channels, *[1] * len(pixels))
    x = randn(*shape) * randn(*per_channel) + 3 * randn(*per_channel)
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [(x, dtype), (randn(channels), wide), (randn(channels), wide)]
    tensors += [(3 * randn(channels), wide), (randn(batch, 2 * channels), dtype)]
    x, *others, dy = (t.to(device, dtype) for t, dtype in [*tensors, (randn(*shape), dtype)])
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return [x, *others], dy


def output_and_gradients(operation, tensors, dy, num_groups, *, with_rows, silu):
    """The output, and the gradients of x, weight, bias; with rows of offset, (scale, shift)."""
    tensors = [t.detach().requires_grad_() for t in tensors[: 5 if with_rows else 3]]
    rows = [None] * 3
    if with_rows:
        rows = [*tensors[4].chunk(2, dim=1), tensors[3].expand(len(dy), -1)]
    y = operation(*tensors[:3], *rows, num_groups, EPS, silu)
    return y, *torch.autograd.grad(y, tensors, dy)


SHAPES = {
    "groups of one channel": ((2, 32, 6, 5), 32),
    "one image, three channels a group": ((1, 6, 7, 3), 2),
    "many pixels": ((2, 20, 33, 9), 2),
    "one pixel": ((2, 96, 1, 1), 4),
    "tokens": ((2, 12, 10), 3),
}
each_shape = pytest.mark.parametrize(("shape", "num_groups"), SHAPES.values(), ids=SHAPES)
each_option = pytest.mark.parametrize(("with_rows", "silu"), [(True, True), (False, False)])


@each_shape
@each_option
def test_operations_of_torch_are_the_formula(shape, num_groups, with_rows, silu):
    arguments = (*inputs(shape), num_groups)
    expected = output_and_gradients(formula, *arguments, with_rows=with_rows, silu=silu)
    actual = output_and_gradients(
        separate_group_norm_silu, *arguments, with_rows=with_rows, silu=silu
    )
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@each_option
def test_the_output_has_the_dtype_of_x_whatever_the_others_have(with_rows, silu):
    tensors, _ = inputs((2, 16, 8, 8), torch.float32)
    x, weight, bias, offset, rows = tensors
    rows = [*rows.chunk(2, dim=1), offset.expand(2, -1)] if with_rows else []
    y = group_norm_silu(x.bfloat16(), weight, bias, *rows, num_groups=4, eps=EPS, silu=silu)
    assert y.dtype == torch.bfloat16


def test_a_large_mean_costs_no_digits():
    (x, weight, bias, *_), _ = inputs((2, 16, 8, 8))
    x, nothing = x + 1000, [None] * 3
    expected = formula(x.float().double(), weight, bias, *nothing, 4, EPS, True)
    arguments = (x.float(), weight.float(), bias.float(), *nothing, 4, EPS, True)
    actual = separate_group_norm_silu(*arguments)
    assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_on_the_cpu_it_is_torchs_operations_bit_for_bit():
    tensors, _ = inputs((2, 16, 8, 8), torch.float32, channels_last=True)
    tensors = (*tensors[:3], *tensors[4].chunk(2, dim=1), tensors[3].expand(2, -1))
    output = group_norm_silu(*tensors, num_groups=4, eps=EPS)
    assert torch.equal(output, separate_group_norm_silu(*tensors, 4, EPS, True))
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_where_triton_cannot_be_imported_it_is_torchs_operations(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "lit_diffusion.networks.fused_norm_triton", None)
    monkeypatch.delattr(networks, "fused_norm_triton", raising=False)
    fused_norm._import_kernels.cache_clear()
    assert fused_norm._import_kernels(gpu) is False
    monkeypatch.setattr(fused_norm, "_has_kernels", lambda *_: fused_norm._import_kernels(gpu))
    (x, weight, bias, *_), _ = inputs((2, 16, 8, 8), torch.float32)
    expected = separate_group_norm_silu(x, weight, bias, *[None] * 3, 4, EPS, True)
    assert torch.equal(group_norm_silu(x, weight, bias, num_groups=4, eps=EPS), expected)
    fused_norm._import_kernels.cache_clear()


# The Triton kernels: on a GPU, or in the interpreter

if INTERPRETED:
    on_device = pytest.mark.parametrize("device", ["cpu"])
else:
    on_device = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.slow
def test_the_kernels_are_right_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "kernels_on", __file__]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


def kernels(*arguments):
    from lit_diffusion.networks.fused_norm_triton import GroupNormSiLU

    return GroupNormSiLU.apply(*arguments)


LAYOUTS = [(name, True, torch.float32) for name in list(SHAPES)[:-1]]
LAYOUTS += [(name, False, torch.float32) for name in SHAPES]
for half in (torch.float16, torch.bfloat16):
    LAYOUTS += [("many pixels", True, half), ("tokens", False, half)]


@on_device
@pytest.mark.parametrize(("name", "channels_last", "dtype"), LAYOUTS)
def test_kernels_on_odd_sizes_are_the_formula(name, channels_last, dtype, device):
    check_kernels(*SHAPES[name], dtype, device, channels_last, with_rows=True, silu=True)


@on_device
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("silu", [True, False])
def test_kernels_on_fewer_terms_are_the_formula(with_rows, silu, device):
    check_kernels((2, 12, 5, 3), 4, torch.float32, device, True, with_rows=with_rows, silu=silu)


def check_kernels(shape, num_groups, dtype, device, channels_last, **options):
    tensors, dy = inputs(shape, dtype, channels_last=channels_last, device=device)
    actual = output_and_gradients(kernels, tensors, dy, num_groups, **options)
    doubles = [t.double() for t in tensors], dy.double()
    expected = output_and_gradients(formula, *doubles, num_groups, **options)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for tensor in actual[:2]:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous(memory_format=memory_format)
    for value, correct in zip(actual, expected, strict=True):
        # An offset has the gradient 0 if each channel is a group: a sum of those of x.
        size = correct.norm() if correct.norm() > 1e-9 else expected[1].norm()
        error = (value.double() - correct).norm() / size
        assert error < TOLERANCE[dtype]


@on_device
@pytest.mark.parametrize("channels_last", [True, False])
def test_kernels_on_a_large_mean_lose_no_digits(channels_last, device):
    tensors, dy = inputs((2, 16, 8, 8), torch.float32, channels_last=channels_last, device=device)
    tensors[0] = tensors[0] + 1000
    options = {"with_rows": False, "silu": True}
    actual, *_ = output_and_gradients(kernels, tensors, dy, 4, **options)
    doubles = [t.double() for t in tensors], dy.double()
    expected, *_ = output_and_gradients(formula, *doubles, 4, **options)
    assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@on_device
def test_kernels_on_slices_and_other_layouts_of_gradients(device):
    tensors, dy = inputs((2, 16, 8, 8), torch.float32, channels_last=True, device=device)
    options = {"with_rows": True, "silu": True}
    expected = output_and_gradients(kernels, tensors, dy, 4, **options)
    channels_last = dy.to(memory_format=torch.channels_last)
    actual = output_and_gradients(kernels, tensors, channels_last, 4, **options)
    assert_close(actual, expected, rtol=0, atol=0)
    wide = torch.zeros(2, 16, 8, 9, device=device)
    wide[..., :8] = tensors[0]
    tensors[0] = wide[..., :8]
    sliced = output_and_gradients(kernels, tensors, dy, 4, **options)
    assert_close(sliced, expected, rtol=1e-5, atol=1e-5)


@on_device
def test_kernels_on_second_derivatives_are_the_formula(device):
    """As Hessian-vector products need them; the same norm twice, which shares its weights."""

    def second_derivatives(operation, tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        rows = (*tensors[4].chunk(2, dim=1), tensors[3].expand(2, -1))
        arguments = (*tensors[1:3], *rows, 4, EPS, True)
        loss = operation(operation(tensors[0], *arguments), *arguments).square().sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        projection = sum((g * g.detach().cos()).sum() for g in first)
        return torch.autograd.grad(projection, tensors)

    tensors, _ = inputs((2, 8, 3, 3), torch.float32, channels_last=True, device=device)
    actual = second_derivatives(kernels, tensors)
    expected = second_derivatives(formula, [t.double() for t in tensors])
    for value, correct in zip(actual, expected, strict=True):
        assert (value.double() - correct).norm() < 1e-3 * correct.norm()


@pytest.mark.gpu
def test_transforms_and_float64_are_left_to_torchs_operations():
    (x, weight, bias, *_), dy = inputs((2, 8, 4, 4), device="cuda")
    options, nothing = {"num_groups": 4, "eps": EPS}, [None] * 3
    expected = formula(x, weight, bias, *nothing, 4, EPS, True)
    assert_close(group_norm_silu(x, weight, bias, **options), expected, rtol=1e-9, atol=1e-9)

    def of_x(x):
        return group_norm_silu(x, weight.float(), bias.float(), **options)

    _, forward = torch.func.jvp(of_x, (x.float(),), (dy.float(),))
    _, correct = torch.func.jvp(
        lambda x: formula(x, weight, bias, *nothing, 4, EPS, True), (x,), (dy,)
    )
    assert_close(forward.double(), correct, rtol=1e-4, atol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.float(), dy.float())
        tangent = torch.autograd.forward_ad.unpack_dual(of_x(dual)).tangent
    assert_close(tangent.double(), correct, rtol=1e-4, atol=1e-4)
