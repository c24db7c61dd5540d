"""Our U-Net against diffusers' own, which is the referee."""

import pytest
import torch
from support.golden import Z, fill_
from torch.testing import assert_close

from lit_diffusion.interchange.diffusers_unet import (
    from_config,
    from_diffusers,
    to_config,
    to_diffusers,
)
from lit_diffusion.networks.unet import UNet

BASE = {"in_channels": 3, "out_channels": 3, "model_channels": 32, "norm_groups": 8}
BASE |= {"channel_mult": [1, 2], "num_res_blocks": 1}
UNETS = {
    "one width attends": BASE | {"num_heads": 4},
    "heads of one size": BASE
    | {"channel_mult": [1, 1.5, 2], "num_res_blocks": 2, "attention_downsample": [1, 4]}
    | {"head_channels": 16, "scale_shift_norm": False, "norm_groups": 16},
    "residual resampling": BASE
    | {"resblock_updown": True, "attention_downsample": [1], "head_channels": 8},
    "resampling without attention": BASE
    | {"resblock_updown": True, "attention_downsample": [], "split_heads_first": False},
    "labels, learned variance": BASE | {"num_classes": 5, "out_channels": 6},
    "a single level": BASE | {"channel_mult": [1], "attention_downsample": [1]},
}


def small_unet(name):
    return fill_(UNet(**UNETS[name])).eval()


def converted(network, arguments):
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    other = diffusers.UNet2DModel(sample_size=8, **to_config(arguments))
    other.load_state_dict(to_diffusers(network.state_dict(), arguments))
    return other.eval()


def inputs(arguments):
    labels = torch.tensor([0, 4, -1]) if "num_classes" in arguments else None
    return Z((3, 3, 8, 8), 1).float(), torch.tensor([0, 123, 999]), labels


@pytest.mark.parametrize("name", UNETS)
def test_output_is_that_of_diffusers_and_of_what_comes_back(name):
    ours = small_unet(name)
    x, t, labels = inputs(UNETS[name])
    their_labels = () if labels is None else (labels.where(labels >= 0, 5),)
    there = converted(ours, UNETS[name])
    arguments, back = from_diffusers(there.state_dict(), to_config(UNETS[name]))
    network = UNet(**arguments).eval()
    network.load_state_dict(back)
    with torch.no_grad():
        expected = there(x, t, *their_labels).sample
        output, again = ours(x, t, labels), network(x, t, labels)
    assert expected.std() > 0.05
    assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert_close(again, output, rtol=1e-6, atol=1e-6)
    assert arguments["num_classes"] == UNETS[name].get("num_classes")


def test_a_network_of_diffusers_comes_in():
    """Whose labels have no row for no class."""
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    torch.manual_seed(0)
    config = to_config(UNETS["labels, learned variance"]) | {"num_class_embeds": 5}
    other = fill_(diffusers.UNet2DModel(sample_size=8, **config)).eval()
    arguments, state = from_diffusers(other.state_dict(), dict(other.config))
    network = UNet(**arguments).eval()
    network.load_state_dict(state)
    x, t, labels = inputs({"num_classes": 5})
    with torch.no_grad():
        expected = other(x, t, labels.abs()).sample
        output = network(x, t, labels.abs())
    assert expected.std() > 0.05
    assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_widths_survive_the_division_by_the_first():
    assert int(480 / 352 * 352) == 479
    config = to_config(BASE) | {"block_out_channels": [352, 480]}
    assert UNet(**from_config(config)).widths == [352, 480]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_downsample": [1]}, "num_heads=4: .* heads of one size, as head_channels"),
        ({"num_heads_upsample": 2}, "num_heads_upsample=2: .* one number of heads"),
        ({"channel_mult": [0.5, 1]}, r"channel_mult=\[0.5, 1\]: .* begins with 1"),
        ({"condition": {"class_path": "Tokens", "init_args": {"dim": 6}}}, "condition=.*Tokens"),
        ({"two_times": True}, "two_times=True: .* one noise level"),
    ],
)
def test_what_diffusers_cannot_express_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        to_config(BASE | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("freq_shift", 1),
        ("mid_block_type", None),
        ("upsample_type", "resnet"),
        ("attn_norm_num_groups", 4),
        ("up_block_types", ["UpBlock2D", "AttnUpBlock2D"]),
        ("down_block_types", ["DownBlock2D", "SkipDownBlock2D"]),
    ],
)
def test_what_our_unet_cannot_express_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        from_config(to_config(UNETS["one width attends"]) | {name: value})
