import math

import pytest
import torch
from support.plain_module import assert_same_bits
from torch import nn

from lit_diffusion.callbacks.parts.averages import (
    Group,
    RawWeights,
    ema_update_,
    overwrite_,
    span_decay,
    warmup_decay,
)


def test_the_average_of_a_constant_is_exactly_the_constant():
    constant = [torch.randn(1000), torch.randn(3, 3) * 1e4]
    shadow = [tensor.clone() for tensor in constant]
    for n in range(2000):
        ema_update_(shadow, constant, warmup_decay(0.9999, n))
    assert all(torch.equal(s, c) for s, c in zip(shadow, constant, strict=True))


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_the_average_of_bfloat16_weights_follows_a_float64_reference(decay):
    generator = torch.Generator().manual_seed(0)
    shadow = [torch.ones(64)]
    reference = torch.ones(64, dtype=torch.float64)
    for n in range(2000):
        param = (1 + 0.1 * torch.randn(64, generator=generator)).bfloat16()
        d = warmup_decay(decay, n)
        ema_update_(shadow, [param], d)
        reference = d * reference + (1 - d) * param.double()
    torch.testing.assert_close(shadow[0].double(), reference, rtol=1e-5, atol=0)


def test_warmup_decay_rises_to_the_decay_and_stays():
    values = [warmup_decay(0.99, n) for n in range(2000)]
    assert values[0] == 0.1
    assert values == sorted(values)
    assert values[-1] == max(values) == 0.99


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("first", [0, 7, 5000])
def test_one_update_for_k_steps_equals_k_updates_on_weights_that_stand_still(first, warmup):
    k, weights = 10, [torch.randn(100)]
    one_by_one, at_once = [torch.zeros(100)], [torch.zeros(100)]
    for n in range(first, first + k):
        ema_update_(one_by_one, weights, warmup_decay(0.999, n) if warmup else 0.999)
    ema_update_(at_once, weights, span_decay(0.999, first, first + k, warmup))
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-7)


def test_span_without_warmup_is_the_power():
    assert math.isclose(span_decay(0.999, 3, 13, warmup=False), 0.999**10, rel_tol=1e-14)


def test_values_are_written_in_the_dtype_of_their_targets():
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    overwrite_(targets, [torch.tensor([1.0, 1.001]), torch.tensor([3.0])])
    assert [t.tolist() for t in targets] == [[1.0, 1.0], [3.0]]
    assert targets[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_averages_are_float32_or_wider(dtype, wide):
    group = Group((0.9, 0.99))
    group.add("w", torch.randn(5, dtype=dtype), None)
    assert [column[0].dtype for column in group.shadows] == [wide, wide]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))


def overwritten(module):
    """The state before, and what keeps it, after every parameter has become 1."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    raw = RawWeights()
    raw.keep(module, module.parameters())
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(1.0)
    return before, raw


def test_weights_come_back_to_the_bit_in_their_own_dtypes(module):
    before, raw = overwritten(module)
    assert all((param == 1).all() for param in module.parameters())
    raw.put_back()
    assert_same_bits(module.state_dict(), before)


def test_state_dict_shows_the_kept_weights_and_nothing_is_left_behind(module):
    before, raw = overwritten(module)
    assert_same_bits(module.state_dict(), before)
    raw.put_back()
    module[0].weight.data.fill_(1.0)
    assert (module.state_dict()["0.weight"] == 1).all()
    assert not module._state_dict_hooks


def test_interrupted_before_the_copies_were_dropped_it_puts_back_once_more(module, monkeypatch):
    before, raw = overwritten(module)

    def half(targets, values):
        targets[0].copy_(values[0])
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", half)
    with pytest.raises(KeyboardInterrupt):
        raw.put_back()
    assert_same_bits(module.state_dict(), before)
    raw.put_back()
    raw.put_back()
    assert_same_bits(module.state_dict(), before)


def test_parameters_that_are_not_kept_are_shown_as_they_are(module):
    raw = RawWeights()
    raw.keep(module, module[0].parameters())
    with torch.no_grad():
        module[2].bias.fill_(3.0)
    assert (module.state_dict()["2.bias"] == 3).all()
