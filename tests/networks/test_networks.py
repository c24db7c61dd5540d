"""What holds for all four networks, with every kind of condition."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from support.golden import Z
from support.small_networks import (
    KINDS,
    NETWORKS,
    arguments,
    batch,
    condition,
    gradients,
    no_condition,
    row,
    small,
    smallest,
)
from torch import nn
from torch.testing import assert_close

from lit_diffusion.networks.conditions import Classes, WordIds
from lit_diffusion.networks.layers import patchify
from lit_diffusion.networks.unet import ResBlock
from lit_diffusion.protocols import by_part

each_network = pytest.mark.parametrize("name", NETWORKS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_condition = pytest.mark.parametrize("kind", list(KINDS)[1:])
transformers = pytest.mark.parametrize("name", ["uvit", "dit", "jit"])


@pytest.mark.parametrize("name", ["unet", "dit", "jit"])
def test_outputs_zero_at_initialization(name):
    network = NETWORKS[name](**arguments(name))
    assert torch.equal(network(*batch(), condition("labels")), torch.zeros(4, 2, 8, 8))


@pytest.mark.parametrize("name", ["dit", "jit"])
def test_blocks_of_adaln_zero_are_identities_at_initialization(name):
    network = NETWORKS[name](**arguments(name))
    x, c = Z((2, 16, 32), 1).float(), Z((2, 32), 2).float()
    positions = () if name == "dit" else (torch.zeros(2, 16, 8), None)
    assert torch.equal(network.blocks[0](x, c, *positions), x)


@pytest.mark.slow
@each_network
def test_a_new_network_learns(name):
    torch.manual_seed(0)
    network = NETWORKS[name](**arguments(name))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    (x, noise_label), labels = batch(), torch.tensor([-1, 0, 1, 2])
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        error = network(x, noise_label, labels) - labels.view(-1, 1, 1, 1)
        losses.append(error.square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@each_network
@each_kind
def test_every_parameter_gets_a_gradient(name, kind):
    for parameter, gradient in gradients(small(name, kind), *batch(), condition(kind)).items():
        assert gradient is not None, parameter
        assert gradient.norm() > 1e-4, parameter


@each_network
@each_kind
def test_an_image_gets_its_own_noise_level_and_condition(name, kind):
    network = small(name, kind).double()
    (x, noise_label), rows = batch(torch.float64), condition(kind, torch.float64)
    together = network(x, noise_label, rows)
    for i in range(4):
        alone = network(x[i : i + 1], noise_label[i : i + 1], row(rows, i))
        assert_close(together[i : i + 1], alone, rtol=1e-10, atol=1e-10)


@each_network
@each_condition
def test_no_condition_is_none_in_every_row_whatever_the_row_holds(name, kind):
    network = small(name, kind).double()
    inputs, rows = batch(torch.float64), condition(kind, torch.float64)
    output, null = network(*inputs), no_condition(kind, torch.float64)
    assert_close(network(*inputs, null), output, rtol=1e-12, atol=1e-12)
    if isinstance(null, tuple):
        absent = torch.full_like(null[0], torch.nan), null[1]
        assert torch.equal(network(*inputs, absent), network(*inputs, null))
        assert all(g.isfinite().all() for g in gradients(network, *inputs, absent).values())
    difference = (network(*inputs, rows) - output).flatten(1).abs().amax(dim=1)
    assert difference[0] < 1e-12  # the first has none
    assert difference[1:].min() > 1e-3


@each_network
def test_tokens_that_are_masked_change_no_bit(name):
    network, inputs = small(name, "tokens"), batch()
    tokens, mask = condition("tokens")
    output = network(*inputs, (tokens, mask))
    for filler in (100.0, torch.nan):
        filled = tokens.where(mask[..., None], filler)
        assert torch.equal(network(*inputs, (filled, mask)), output)


@each_network
def test_tokens_are_a_set(name):
    network, inputs = small(name, "tokens").double(), batch(torch.float64)
    tokens, mask = condition("tokens", torch.float64)
    flipped = network(*inputs, (tokens.flip(1), mask.flip(1)))
    assert_close(flipped, network(*inputs, (tokens, mask)), rtol=1e-10, atol=1e-10)


@each_network
def test_words_are_in_an_order(name):
    network, inputs = small(name, "words").double(), batch(torch.float64)
    words = condition("words")
    output = network(*inputs, words)
    flipped = network(*inputs, words.flip(1))
    assert ((flipped - output)[2:].flatten(1).abs().amax(1) > 1e-4).all()


@transformers
def test_patches_know_their_positions(name):
    """Even those of a plain image, which differ in nothing else."""
    with torch.no_grad():
        output = small(name, "none")(torch.ones(1, 1, 8, 8), torch.tensor([500.0]))
    patches = patchify(output, 2)[0]
    assert (torch.cdist(patches, patches) + torch.eye(16)).min() > 1e-2


# Memory, precision, compilation


@each_network
@pytest.mark.parametrize("kind", ["labels", "tokens"])  # in all other kinds blocks get the same
def test_gradient_checkpointing_computes_every_block_twice_and_changes_no_bit(name, kind):
    changes = {"dropout": 0.3} if name == "unet" else {}
    results = []
    for enabled in (False, True):
        network, calls = small(name, kind, gradient_checkpointing=enabled, **changes), []
        blocks = [m for m in network.modules() if hasattr(m, "attn") or isinstance(m, ResBlock)]
        for block in blocks:
            block.register_forward_pre_hook(lambda block, args, calls=calls: calls.append(block))
        torch.manual_seed(0)
        results.append(gradients(network, *batch(), condition(kind)))
        assert [calls.count(block) for block in blocks] == [1 + enabled] * len(blocks)
    assert len(blocks) >= 4
    for parameter, gradient in results[0].items():
        assert torch.equal(gradient, results[1][parameter]), parameter


@each_network
@each_kind
def test_no_value_is_read_back_from_the_device(name, kind):
    """The meta device has no values: a host synchronisation or a branch on data would raise."""
    with torch.device("meta"):
        network = NETWORKS[name](**arguments(name, kind, gradient_checkpointing=True))
    inputs = (by_part(lambda part: part.to("meta"), part) for part in (*batch(), condition(kind)))
    output = network(*inputs)
    assert output.requires_grad
    assert output.shape == (4, 2, 8, 8)


@each_network
@each_kind
def test_bfloat16_autocast_is_close_and_keeps_norms_and_output_in_float32(name, kind, monkeypatch):
    network, dtypes = small(name, kind), []
    expected = network(*batch(), condition(kind))
    for norm in ("layer_norm", "rms_norm", "group_norm"):
        monkeypatch.setattr(F, norm, recording(getattr(F, norm), dtypes))
    with torch.autocast("cpu", torch.bfloat16):
        output = network(*batch(), condition(kind))
    assert output.dtype == torch.float32
    assert set(dtypes) == {torch.float32}
    error = (output - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.03


@each_kind
@pytest.mark.parametrize("name", ["dit", "jit"])
def test_the_residual_stream_is_contiguous_in_the_dtype_of_autocast(name, kind):
    network, streams = small(name, kind), []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    network(*batch(), condition(kind))
    assert {x.dtype for x in streams} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        network(*batch(), condition(kind))
    assert {x.dtype for x in streams[len(network.blocks) :]} == {torch.bfloat16}
    assert all(x.is_contiguous() for x in streams)


def recording(function, dtypes):
    def recorded(x, *arguments):
        dtypes.append(x.dtype)
        return function(x, *arguments)

    return recorded


@each_network
@each_kind
def test_a_bfloat16_network_is_close(name, kind):
    x, noise_label = batch()
    expected = small(name, kind)(x, noise_label, condition(kind))
    output = small(name, kind).bfloat16()(x.bfloat16(), noise_label, condition(kind))
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
@each_network
@each_condition
def test_torch_compile_captures_network_and_gradient_in_one_graph(name, kind):
    network = smallest(name, kind, gradient_checkpointing=kind == "tokens").double()
    inputs = (*batch(torch.float64), condition(kind, torch.float64))
    expected, names = gradients(network, *inputs), list(network.state_dict())
    torch.compiler.reset()  # of other tests' graphs, which count against a limit
    network.compile(fullgraph=True, backend="aot_eager" if kind == "tokens" else "eager")
    for parameter, gradient in gradients(network, *inputs).items():
        assert_close(gradient, expected[parameter], rtol=1e-8, atol=1e-8)
    assert list(network.state_dict()) == names


# Refusals


@transformers
def test_images_of_another_size_are_refused(name):
    with pytest.raises(ValueError, match=r"image_size=8\) got images of shape \(2, 1, 8, 16\)"):
        small(name)(torch.zeros(2, 1, 8, 16), torch.zeros(2), torch.zeros(2).long())


@transformers
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"patch_size": 3}, "patch_size must divide image_size, got 3 and 8"),
        ({"patch_size": 0}, "patch_size must divide image_size, got 0 and"),
        ({"num_heads": 0}, "got width=32 and num_heads=0"),
        ({"width": 30, "num_heads": 3}, "got width=30 and num_heads=3"),
        ({"width": 10**9}, "at most 100000"),
        ({"depth": 10**9}, "got 32, 8 and 1000000000"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        small(name, **sizes)


@each_network
def test_a_network_takes_one_kind_of_condition(name):
    with pytest.raises(ValueError, match=r"num_classes=10 or condition=WordIds\(num_words=4\)"):
        small(name, condition=WordIds(4))
    with pytest.raises(TypeError, match=r"must be Classes, Vectors, Tokens or WordIds .*, got 10"):
        small(name, "none", condition=10)


@each_network
def test_labels_must_be_there_without_a_null_class(name):
    network = small(name, "none", condition=Classes(10, null_class=False))
    assert network(*batch(), torch.arange(4)).shape == (4, 2, 8, 8)
    with pytest.raises(ValueError, match="null_class=False needs labels, got None"):
        network(*batch())
    with pytest.raises(IndexError):
        network(*batch(), condition("labels"))


@each_network
@each_condition
def test_a_network_can_be_written_in_yaml(name, kind):
    network_class, condition_kind = NETWORKS[name], KINDS[kind].get("condition", Classes(10))
    path = f"{Classes.__module__}.{type(condition_kind).__name__}"
    init_args = arguments(name, "none")
    init_args["condition"] = {"class_path": path, "init_args": asdict(condition_kind)}
    path = f"{network_class.__module__}.{network_class.__name__}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=nn.Module)
    config = {"network": {"class_path": path, "init_args": init_args}}
    network = parser.instantiate(parser.parse_object(config)).network
    assert network(*batch(), condition(kind)).shape == (4, 2, 8, 8)
