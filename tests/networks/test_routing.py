"""Routed tokens skip blocks in training, and come back to their places unchanged."""

import pytest
import torch
from scipy.stats import chi2
from support.small_networks import batch, condition, gradients, small, smallest
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from lit_diffusion.modules.sharding import shard_network
from lit_diffusion.networks.routing import Route, TokenRouting

HALF = TokenRouting(fraction=0.5, start=1, end=3)
"""JiT's tokens for labels are appended at block 2, inside of it."""
networks = pytest.mark.parametrize("name", ["dit", "jit"])
kinds = pytest.mark.parametrize("kind", ["none", "labels", "tokens"])


def record_inputs(network):
    """The inputs of each block, by its index, in calls that follow."""
    inputs = {}
    for i, block in enumerate(network.blocks):
        block.register_forward_pre_hook(lambda _, args, i=i: inputs.update({i: args}))
    return inputs


def both(name, kind, routing=HALF, **changes):
    """A network with routing and the same one without."""
    return small(name, kind, token_routing=routing, **changes), small(name, kind, **changes)


@networks
@kinds
def test_a_fraction_of_0_changes_no_bit(name, kind):
    routed, plain = both(name, kind, TokenRouting(0.0, 1, 3))
    inputs = (*batch(), condition(kind))
    assert torch.equal(routed(*inputs), plain(*inputs))
    expected = gradients(plain, *inputs)
    for parameter, gradient in gradients(routed, *inputs).items():
        assert torch.equal(gradient, expected[parameter]), parameter


@networks
@kinds
def test_nothing_is_routed_or_drawn_in_evaluation_or_without_routing(name, kind):
    routed, plain = both(name, kind)
    inputs, before = (*batch(), condition(kind)), torch.get_rng_state()
    output = plain(*inputs)
    assert torch.equal(routed.eval()(*inputs), output)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(routed.train()(*inputs), output)
    assert not torch.equal(torch.get_rng_state(), before)


@networks
@kinds
def test_routing_changes_nothing_if_blocks_are_identities(name, kind):
    routed, plain = both(name, kind)
    for network in (routed, plain):
        for block in network.blocks:
            torch.nn.init.zeros_(block.adaLN_modulation[1].weight)
            torch.nn.init.zeros_(block.adaLN_modulation[1].bias)
    inputs = (*batch(), condition(kind))
    output = plain(*inputs)
    assert output.abs().max() > 0.1
    assert torch.equal(routed(*inputs), output)


@networks
@kinds
def test_routed_tokens_come_back_unchanged_and_the_others_do_not_see_them(name, kind):
    """The others are as in a network without routing whose attention ignores the routed tokens.

    There, all tokens have their own positions, so those of the others have come with them.
    """
    routed, plain = (network.double() for network in both(name, kind))
    inputs = (*batch(torch.float64), condition(kind, torch.float64))
    inside, masked = record_inputs(routed), record_inputs(plain)
    output = routed(*inputs)
    plain(*inputs)
    whole, fewer = masked[1][0], inside[1][0]
    is_kept = (whole[:, :, None] == fewer[:, None]).all(-1).any(2)  # (B, N + E)
    assert is_kept[:, :16].sum(1).tolist() == [8] * 4
    assert is_kept[:, 16:].all()
    back = inside[3][0][:, : whole.shape[1]]  # without JiT's tokens that were appended meanwhile
    assert torch.equal(back[~is_kept], whole[~is_kept])
    assert (back[is_kept] - whole[is_kept]).abs().amax(1).min() > 1e-3

    def add_mask(block, args):
        x, c, *positions, mask = args
        extra = torch.ones(4, x.shape[1] - whole.shape[1], dtype=torch.bool)
        keep = torch.cat([is_kept, extra], 1)
        return (x, c, *positions, keep if mask is None else keep & mask)

    def put_back(block, args, x):
        keep = torch.cat([is_kept, is_kept.new_ones(4, x.shape[1] - whole.shape[1])], 1)
        return torch.where(keep[..., None], x, args[0])

    for block in plain.blocks[1:3]:
        block.register_forward_pre_hook(add_mask)
        block.register_forward_hook(put_back)
    assert_close(plain(*inputs), output, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_tokens_are_routed_equally_often_and_independently_of_the_image(fraction):
    """The counts of a sample without replacement have the covariance of chi-square, times 16/15."""
    torch.manual_seed(0)
    route = Route(TokenRouting(fraction, 0, 1), num_patches=16)
    route.before_block(0, torch.zeros(4000, 16, 1))
    kept = torch.zeros(4000, 16).scatter(1, route.kept, 1.0)
    num_kept = 16 * (1 - fraction)
    assert (kept.sum(1) == num_kept).all()
    variance = 4000 * fraction * (1 - fraction) * 16 / 15
    statistic = ((kept.sum(0) - 4000 * (1 - fraction)).square() / variance).sum().item()
    assert chi2.cdf(statistic, 15) < 0.999
    # two images have num_kept**2 / 16 of them in common, on average
    common = (kept[:2000] * kept[2000:]).sum(1).mean().item()
    assert common == pytest.approx(num_kept**2 / 16, abs=0.15)
    assert len(kept.unique(dim=0)) > 1000


def flops(network, *inputs):
    # The counter does not know attention's fused kernel on CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(*inputs)
    return counter.get_total_flops()


@networks
def test_the_operations_of_skipped_blocks_fall_as_the_number_of_their_tokens(name):
    """A block has 2 B N D (4 D + M) operations for linear maps, and 4 B N**2 D for attention."""
    routing = TokenRouting(0.25, 0, 3)
    routed, plain = both(name, "none", routing)
    mlp = 3 * (2 * 128 // 3) if name == "jit" else 2 * 128  # SwiGLU has three maps

    def block(tokens, width=32):
        return 4 * (2 * tokens * width * (4 * width + mlp) + 4 * tokens**2 * width)

    expected = 3 * (block(16) - block(12))
    assert flops(plain, *batch()) - flops(routed, *batch()) == expected


@networks
def test_gradient_checkpointing_changes_no_gradient(name):
    plain, inputs = small(name, token_routing=HALF), (*batch(), condition("labels"))
    checkpointed = small(name, token_routing=HALF, gradient_checkpointing=True)
    torch.manual_seed(0)
    expected = gradients(plain, *inputs)
    torch.manual_seed(0)
    for parameter, gradient in gradients(checkpointed, *inputs).items():
        assert torch.equal(gradient, expected[parameter]), parameter


@networks
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.slow
def test_it_compiles_to_one_graph(name, by_block):
    routing = TokenRouting(0.5, 0, 1)
    network, eager = (smallest(name, "labels", token_routing=routing) for _ in range(2))
    for part in network.blocks if by_block else [network]:
        part.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    inputs = (*batch(), condition("labels"))
    torch.manual_seed(0)
    expected = gradients(eager, *inputs)
    torch.manual_seed(0)
    for parameter, gradient in gradients(network, *inputs).items():
        assert_close(gradient, expected[parameter], msg=parameter)


@networks
def test_it_works_with_weights_that_are_split_by_block(name, one_rank):
    network, whole = (small(name, token_routing=HALF) for _ in range(2))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    shard_network(network, mesh, "32-true")
    inputs = (*batch(), condition("labels"))
    torch.manual_seed(0)
    expected = gradients(whole, *inputs)
    torch.manual_seed(0)
    for parameter, gradient in gradients(network, *inputs).items():
        assert_close(gradient.full_tensor(), expected[parameter], msg=parameter)


@networks
def test_it_works_in_bfloat16(name):
    network, inputs = small(name, token_routing=HALF), (*batch(), condition("labels"))
    torch.manual_seed(0)
    expected = network(*inputs)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        output = network(*inputs)
    assert (output - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1, 2), "fraction must be at least 0 and below 1, got 1.0"),
        ((-0.1, 1, 2), "fraction must be at least 0 and below 1, got -0.1"),
        ((0.5, 2, 2), "0 <= start < end must hold, got 2 and 2"),
        ((0.5, -1, 2), "0 <= start < end must hold, got -1 and 2"),
    ],
)
def test_numbers_that_make_no_route_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenRouting(*arguments)


@networks
def test_one_patch_of_an_image_at_least_is_not_routed(name):
    with pytest.raises(ValueError, match=r"fraction=0.97 is rounded to all .* at most 0.9375"):
        small(name, token_routing=TokenRouting(0.97, 1, 3))
    network = small(name, token_routing=TokenRouting(0.96, 1, 3))
    assert network(*batch(), condition("labels")).isfinite().all()


@pytest.mark.parametrize("num_patches", [1, 3, 16, 4096, 10**6])
def test_the_fraction_of_the_advice_routes_all_patches_but_one(num_patches):
    with pytest.raises(ValueError, match="use at most") as refused:
        TokenRouting(1 - 1e-9, 0, 1).check_network(2, num_patches)
    advised = float(str(refused.value).split()[-1].removesuffix("."))
    assert TokenRouting(advised, 0, 1).num_routed(num_patches) == num_patches - 1


@networks
def test_a_block_must_get_all_tokens_again(name):
    with pytest.raises(ValueError, match=r"end must be below the depth 4, .* got end=4"):
        small(name, token_routing=TokenRouting(0.5, 1, 4))
