from inspect import signature

import pytest
import torch
from support.golden import Z, close, fill_, load, tensor
from support.small_networks import batch, condition, small

from lit_diffusion.networks.conditions import Classes
from lit_diffusion.networks.uvit import UViT

CASE = "case09_uvit"
GOLDEN = {
    "uvit_uncond": lambda: UViT(16, 3, 3, 2, width=64, depth=4, num_heads=4),
    "uvit_cond": lambda: UViT(
        8, 4, 4, 2, 64, 4, 2, final_conv=False, condition=Classes(6, null_class=False)
    ),
    "uvit_cond_mlptime": lambda: UViT(
        8, 3, 3, 4, 48, 6, 3, mlp_ratio=2, qkv_bias=True, mlp_time_embed=True, num_classes=5
    ),
}
SIZES = {
    "S": {"width": 512, "depth": 12, "num_heads": 8},
    "M": {"width": 768, "depth": 16, "num_heads": 12},
    "L": {"width": 1024, "depth": 20, "num_heads": 16},
    "H": {"width": 1152, "depth": 28, "num_heads": 16, "final_conv": False},
}
IMAGENET64 = {"condition": Classes(1000, null_class=False)}
PUBLISHED = {
    "uvit_S2_cifar10": lambda: UViT(32, 3, 3, 2, **SIZES["S"]),
    "uvit_M4_imagenet64": lambda: UViT(64, 3, 3, 4, **SIZES["M"], **IMAGENET64),
    "uvit_L4_imagenet64": lambda: UViT(64, 3, 3, 4, **SIZES["L"], **IMAGENET64),
    "uvit_L4_imagenet512": lambda: UViT(64, 4, 4, 4, **SIZES["L"], num_classes=1000),
    "uvit_H4_imagenet512": lambda: UViT(64, 4, 4, 4, **SIZES["H"], num_classes=1000),
    "uvit_H2_imagenet256": lambda: UViT(32, 4, 4, 2, **SIZES["H"], num_classes=1000),
}


@pytest.mark.parametrize("tag", GOLDEN)
def test_float64_output_is_that_of_the_reference(tag):
    """Its names, shapes and float32 output are in tests/interchange/test_published.py."""
    # out_f64, not out_f64_emb32: the sinusoids are in float64 here.
    network = fill_(GOLDEN[tag]().double())
    x = Z((2, network.patch_embed.proj.in_channels, *2 * [network.image_size]), 700)
    labels = tensor(CASE, f"{tag}/y") if f"{tag}/y" in load(CASE) else None
    with torch.no_grad():
        output = network(x, tensor(CASE, f"{tag}/timesteps"), labels)
    close(output, tensor(CASE, f"{tag}/out_f64"), rtol=1e-9, atol=1e-9)


def test_no_label_is_the_last_class_of_the_reference():
    """In which it is a class like the others."""
    with_null = fill_(GOLDEN["uvit_cond_mlptime"]().double())
    labels = Classes(6, null_class=False)
    reference = UViT(8, 3, 3, 4, 48, 6, 3, 2, True, True, condition=labels).double()
    reference.load_state_dict(with_null.state_dict())
    x, noise_label = Z((2, 3, 8, 8), 700), torch.tensor([3.0, 700])
    last = reference(x, noise_label, torch.tensor([5, 5]))
    assert torch.equal(with_null(x, noise_label, torch.tensor([-1, -1])), last)
    assert torch.equal(with_null(x, noise_label), last)


def test_the_default_is_size_s():
    defaults = signature(UViT).parameters
    assert {name: defaults[name].default for name in SIZES["S"]} == SIZES["S"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        network = PUBLISHED[name]()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == load("param_counts")[name]


@pytest.mark.parametrize(("kind", "extras"), [("none", 1), ("vectors", 2), ("tokens", 1)])
def test_the_sequence_has_a_position_for_noise_level_and_vector_but_not_for_tokens(kind, extras):
    network, inputs = small("uvit", kind), []
    network.in_blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args))
    network(*batch(), condition(kind))
    assert network.pos_embed.shape == (1, extras + 16, 32)
    ((tokens, mask),) = inputs
    if kind == "tokens":
        assert tokens.shape[1] == extras + 16 + 1 + 5
        assert mask.sum(1).tolist() == [17 + 1, 17 + 1, 17 + 3, 17 + 5]
    else:
        assert tokens.shape[1] == extras + 16
        assert mask is None


def test_a_new_network_has_the_spread_of_the_authors():
    torch.manual_seed(0)
    network = UViT(8, 1, 1, 2, 128, 4, 2).requires_grad_(False)
    assert network.in_blocks[0].mlp.fc1.weight.std() == pytest.approx(0.02, rel=0.02)
    assert network.out_blocks[0].skip_linear.weight.std() == pytest.approx(0.02, rel=0.02)
    assert network.pos_embed.std() == pytest.approx(0.02, rel=0.1)
    assert not network.decoder_pred.bias.any()


def test_the_depth_must_be_even():
    with pytest.raises(ValueError, match=r"depth must be even, .* got 3"):
        UViT(8, 1, 1, depth=3)
