"""Our DiT against diffusers' own, which is the referee."""

from functools import partial

import pytest
import torch
from support.golden import Z, fill_
from torch.testing import assert_close

from lit_diffusion.interchange.diffusers_dit import to_config, to_diffusers
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import timestep_embedding

SIZES = [
    {"patch_size": 2, "width": 48, "depth": 3, "num_heads": 4, "out_channels": 6},
    {"patch_size": 4, "width": 32, "depth": 2, "num_heads": 2, "out_channels": 3},
]
BASE = {"image_size": 8, "in_channels": 3, "num_classes": 10}


def filled(arguments):
    """Weights that all matter, and the table of positions as it is, which is not trained."""
    network = DiT(**arguments)
    positions = network.pos_embed.clone()
    fill_(network).pos_embed.copy_(positions)
    return network.eval()


def converted(network, arguments):
    diffusers = pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    other = diffusers.DiTTransformer2DModel(**to_config(arguments))
    missing, foreign = other.load_state_dict(to_diffusers(network.state_dict()), strict=False)
    assert (set(missing) <= {"pos_embed.pos_embed"}, foreign) == (True, [])
    for block in other.transformer_blocks:  # theirs has other frequencies, in float32
        del block.norm1.emb.time_proj
        block.norm1.emb.time_proj = partial(timestep_embedding, dim=256)
    return other.double().eval()


@pytest.mark.parametrize("sizes", SIZES)
def test_output_is_that_of_diffusers_at_our_frequencies(sizes):
    """A pipeline with theirs is in test_diffusers_folder."""
    ours = filled(BASE | sizes)
    other = converted(ours, BASE | sizes)
    labels, t = torch.tensor([0, 9, -1]), torch.tensor([0, 123, 999])
    x = Z((3, 3, 8, 8), 1).double()
    with torch.no_grad():
        expected = other(x, t, labels.where(labels >= 0, 10)).sample
        output = ours.double()(x, t, labels)
    assert expected.std() > 0.05
    assert_close(output, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": None}, "num_classes=None"),
        ({"condition": {"class_path": "Tokens", "init_args": {"dim": 6}}}, "condition=.*Tokens"),
        ({"mlp_ratio": 2}, "mlp_ratio=2: .* has 4"),
        ({"two_times": True}, "two_times=True: .* one noise level"),
    ],
)
def test_what_diffusers_cannot_express_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        to_config(BASE | SIZES[0] | changes)
