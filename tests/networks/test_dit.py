from functools import partial

import pytest
import torch
from support.golden import Z
from support.small_transformers import batch, condition, small
from torch.testing import assert_close

from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import timestep_embedding
from lit_diffusion.networks.transformers import sincos_2d

SIZES = {
    "S": {"width": 384, "depth": 12, "num_heads": 6},
    "B": {"width": 768, "depth": 12, "num_heads": 12},
    "L": {"width": 1024, "depth": 24, "num_heads": 16},
    "XL": {"width": 1152, "depth": 28, "num_heads": 16},
}


def count(size, latents=32, patch_size=2):
    """Trained parameters, and with the table of positions, as published."""
    with torch.device("meta"):
        network = DiT(latents, 4, 8, patch_size, **SIZES[size], num_classes=1000)
    trained = sum(parameter.numel() for parameter in network.parameters())
    return trained, sum(value.numel() for value in network.state_dict().values())


def test_xl_2_has_the_published_number_of_parameters():
    assert count("XL") == (675_129_632 - 256 * 1152, 675_129_632)
    assert count("XL", latents=64)[0] == count("XL")[0]


@pytest.mark.parametrize(
    ("size", "patch_size", "millions"),
    [("S", 2, 33), ("S", 8, 33), ("B", 4, 130), ("L", 2, 458), ("L", 4, 458), ("XL", 4, 675)],
)
def test_the_others_have_the_number_of_the_paper(size, patch_size, millions):
    """Table 1 and 4 of Peebles & Xie 2022, which round."""
    assert round(count(size, patch_size=patch_size)[1] / 1e6) in (millions, millions + 1)


def test_parameters_have_the_names_of_the_published_checkpoints():
    network = DiT(32, 4, 8, 2, 32, 2, 2, num_classes=1000)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    block = {
        "attn.qkv.weight": (96, 32),
        "attn.qkv.bias": (96,),
        "attn.proj.weight": (32, 32),
        "attn.proj.bias": (32,),
        "mlp.fc1.weight": (128, 32),
        "mlp.fc1.bias": (128,),
        "mlp.fc2.weight": (32, 128),
        "mlp.fc2.bias": (32,),
        "adaLN_modulation.1.weight": (192, 32),
        "adaLN_modulation.1.bias": (192,),
    }
    assert shapes == {
        "pos_embed": (1, 256, 32),
        "x_embedder.proj.weight": (32, 4, 2, 2),
        "x_embedder.proj.bias": (32,),
        "t_embedder.mlp.0.weight": (32, 256),
        "t_embedder.mlp.0.bias": (32,),
        "t_embedder.mlp.2.weight": (32, 32),
        "t_embedder.mlp.2.bias": (32,),
        "y_embedder.embedding_table.weight": (1001, 32),
        **{f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()},
        "final_layer.linear.weight": (32, 32),
        "final_layer.linear.bias": (32,),
        "final_layer.adaLN_modulation.1.weight": (64, 32),
        "final_layer.adaLN_modulation.1.bias": (64,),
    }


def test_positions_are_a_table_that_is_not_trained():
    network = DiT(8, 1, 1, 2, 32, 1, 2)
    assert "pos_embed" not in dict(network.named_parameters())
    assert torch.equal(network.pos_embed, sincos_2d(4, 32))


def test_a_new_network_is_initialised_as_in_the_paper():
    torch.manual_seed(0)
    network = DiT(8, 3, 3, 4, 128, 1, 2, num_classes=100).requires_grad_(False)
    uniform = (6 / (128 + 512)) ** 0.5
    assert network.blocks[0].mlp.fc1.weight.abs().max() == pytest.approx(uniform, rel=1e-2)
    flat = (6 / (128 + 3 * 16)) ** 0.5
    assert network.x_embedder.proj.weight.abs().max() == pytest.approx(flat, rel=1e-2)
    for table in (network.y_embedder["embedding_table"], network.t_embedder["mlp"][2]):
        assert table.weight.std() == pytest.approx(0.02, rel=0.05)


def test_labels_and_vectors_are_added_to_the_noise_level():
    """A label's row may as well be a bias of the noise level's embedding."""
    network, (x, noise_label) = small("dit").double(), batch(torch.float64)
    labels = torch.full((4,), 3)
    expected = network(x, noise_label, labels)
    with torch.no_grad():
        table = network.y_embedder["embedding_table"].weight
        network.t_embedder["mlp"][2].bias += table[3] - table[5]
    assert_close(network(x, noise_label, labels + 2), expected, rtol=1e-10, atol=1e-10)


def test_tokens_are_joined_to_the_patches():
    network, lengths = small("dit", "tokens"), []
    network.blocks[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    network(*batch(), condition("tokens"))
    network(*batch())
    assert lengths == [16 + 1 + 5, 16 + 1]


# The referee


def theirs(ours, patch_size, width, depth, heads):
    """diffusers' network with our weights, and the two defaults of the paper that it has not."""
    diffusers = pytest.importorskip("diffusers", reason="pip install lit-diffusion[diffusers]")
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=3,
        out_channels=6,
        num_layers=depth,
        sample_size=8,
        patch_size=patch_size,
        num_embeds_ada_norm=10,
        norm_eps=1e-6,
    )
    state, mine = {}, ours.state_dict()
    for kind in ("weight", "bias"):
        state[f"pos_embed.proj.{kind}"] = mine[f"x_embedder.proj.{kind}"]
        state[f"proj_out_1.{kind}"] = mine[f"final_layer.adaLN_modulation.1.{kind}"]
        state[f"proj_out_2.{kind}"] = mine[f"final_layer.linear.{kind}"]
        for i in range(depth):
            here, there = f"blocks.{i}", f"transformer_blocks.{i}"
            q, k, v = mine[f"{here}.attn.qkv.{kind}"].chunk(3)
            state |= {
                f"{there}.attn1.to_{n}.{kind}": p for n, p in zip("qkv", (q, k, v), strict=True)
            }
            for inside, outside in (
                (f"{here}.attn.proj", "attn1.to_out.0"),
                (f"{here}.mlp.fc1", "ff.net.0.proj"),
                (f"{here}.mlp.fc2", "ff.net.2"),
                (f"{here}.adaLN_modulation.1", "norm1.linear"),
                ("t_embedder.mlp.0", "norm1.emb.timestep_embedder.linear_1"),
                ("t_embedder.mlp.2", "norm1.emb.timestep_embedder.linear_2"),
            ):
                state[f"{there}.{outside}.{kind}"] = mine[f"{inside}.{kind}"]
    for i in range(depth):
        table = f"transformer_blocks.{i}.norm1.emb.class_embedder.embedding_table.weight"
        state[table] = mine["y_embedder.embedding_table.weight"]
    missing, foreign = network.load_state_dict(state, strict=False)
    assert (set(missing) <= {"pos_embed.pos_embed"}, foreign) == (True, [])
    for block in network.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    return network.eval()


def in_float64(network):
    """Sinusoids too, of which diffusers' are in float32."""
    for block in network.transformer_blocks:
        del block.norm1.emb.time_proj
        block.norm1.emb.time_proj = partial(timestep_embedding, dim=256)
    return network.double()


def random_dit(*sizes):
    torch.manual_seed(0)
    network = DiT(8, 3, 6, *sizes, num_classes=10)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.5 * parameter[0].numel() ** -0.5)
    return network


@pytest.mark.parametrize("sizes", [(2, 48, 3, 4), (4, 32, 2, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_output_is_that_of_diffusers(sizes, dtype, tolerance):
    ours = random_dit(*sizes)
    other = theirs(ours, *sizes)
    other = in_float64(other) if dtype == torch.float64 else other
    labels = torch.tensor([0, 9, -1])
    x, t = Z((3, 3, 8, 8), 1).to(dtype), torch.tensor([0, 123, 999])
    with torch.no_grad():
        expected = other(x, t, labels.where(labels >= 0, 10)).sample
        output = ours.to(dtype)(x, t, labels)
    assert expected.std() > 0.05
    assert_close(output, expected, rtol=tolerance, atol=tolerance)
