import pytest
import torch
from support.plain_module import assert_same_bits
from torch import nn

from lit_diffusion.callbacks.parts.raw_weights import RawWeights


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
