"""Laws of magnitude-preserving layers, and of a U-Net that is made of them."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import ModelParallelStrategy
from support.golden import Z
from support.plain_module import assert_same_bits, make_trainer
from support.resuming import TRAINER_SETTINGS, Recipe, assert_undisturbed, small_unet
from support.small_networks import batch, condition, gradients
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lit_diffusion.callbacks import EMA
from lit_diffusion.modules.optimizers import optimizer_and_schedule
from lit_diffusion.networks.layers import Patched
from lit_diffusion.networks.magnitude_preserving import (
    CosineAttention,
    MagnitudePreservingUNet,
    MPConv,
    MPFourier,
    MPLabelEmbedding,
    MPLinear,
    mp_cat,
    mp_silu,
    mp_sum,
    normalize,
)
from lit_diffusion.networks.unet import UNet
from lit_diffusion.optimizers import MuonAdamW
from lit_diffusion.processes import DiscreteVP, EDMProcess, LinearBetas

SIZES = {"in_channels": 1, "out_channels": 2, "fourier_bandwidth": 0.005, "model_channels": 16}
SIZES |= {"channel_mult": (1, 2), "num_res_blocks": 1, "attention_downsample": (2,)}
SIZES |= {"head_channels": 8, "num_classes": 10}


MILLIONS = {128: 125, 192: 280, 256: 498, 320: 777, 384: 1119, 448: 1523}
"""Parameters of EDM2-XS to EDM2-XXL by their number of channels."""


def new(**changes):
    torch.manual_seed(0)
    return MagnitudePreservingUNet(**SIZES | changes)


def small(**changes):
    """All of whose parameters matter."""
    network = new(**changes)
    for name, parameter in network.named_parameters():
        if name.endswith("gain"):
            nn.init.constant_(parameter, 0.5)
    return network


def magnitude(x, dim=None):
    return x.detach().double().square().mean(dim).sqrt()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def is_unit(x, tolerance):
    return magnitude(x).item() == pytest.approx(1, abs=tolerance)


# Each layer preserves the magnitude


def test_linear_maps_and_convolutions_preserve_the_magnitude_whatever_that_of_their_weights():
    torch.manual_seed(0)
    for scale in (1e-2, 1, 100):
        linear, convs = MPLinear(96, 200), (MPConv(48, 200, 3), MPConv(48, 200, 1))
        for layer in (linear, *convs):
            with torch.no_grad():
                layer.weight *= scale
        assert is_unit(linear(normal(500, 96)), 0.02)
        for conv in convs:
            output = conv(normal(8, 48, 16, 16))
            assert output.shape == (8, 200, 16, 16)
            assert is_unit(output[..., 1:-1, 1:-1], 0.02)


def test_the_gain_is_the_magnitude():
    torch.manual_seed(0)
    layer, x = MPLinear(96, 200), normal(500, 96)
    assert_close(layer(x, gain=torch.tensor([0.25])), 0.25 * layer(x))


def test_silu_of_normal_numbers_has_magnitude_1():
    assert is_unit(mp_silu(normal(10**6)), 0.003)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
def test_sums_of_uncorrelated_numbers_have_magnitude_1(t):
    a, b = normal(10**5, seed=1), normal(10**5, seed=2)
    assert is_unit(mp_sum(a, b, t), 0.01)
    norm = math.sqrt((1 - t) ** 2 + t**2)
    assert_close(mp_sum(a, b, t), ((1 - t) * a + t * b) / norm)


@pytest.mark.parametrize("channels", [(8, 8), (48, 16), (5, 120)])
@pytest.mark.parametrize("t", [0.2, 0.5, 0.9])
def test_concatenations_have_magnitude_1_and_contributions_in_the_ratio_of_t(channels, t):
    torch.manual_seed(0)
    a, b = (normal(64, n, 8, 8, seed=n) for n in channels)
    both = mp_cat(a, b, t)
    assert is_unit(both, 0.02)
    conv, (n, _) = MPConv(sum(channels), 200, 1), channels
    from_a, from_b = both.clone(), both.clone()
    from_a[:, n:] = from_b[:, :n] = 0
    ratio = magnitude(conv(from_b)) / magnitude(conv(from_a))
    assert ratio == pytest.approx(t / (1 - t), rel=0.1)


def test_fourier_features_have_magnitude_1_at_every_noise_level_and_turn_with_it():
    torch.manual_seed(0)
    labels = torch.tensor([-1.5, 0.0, 0.3, 1.0])
    features = MPFourier(20_000, bandwidth=1.0)(labels)
    assert_close(magnitude(features, 1), torch.ones(4).double(), atol=0.02, rtol=0)
    # E[2 cos(f x + phi) cos(f y + phi)] = E[cos(f (x - y))], that of a normal f.
    kernel = features @ features.T / 20_000
    distance = 2 * math.pi * (labels[:, None] - labels).double()
    assert_close(kernel, (-distance.square() / 2).exp(), atol=0.03, rtol=0)


def test_the_bandwidth_is_the_unit_of_labels():
    labels = torch.tensor([0.0, 0.25, 1.0])
    torch.manual_seed(0)
    small_labels = MPFourier(32, bandwidth=1.0)(labels)
    torch.manual_seed(0)
    assert_close(MPFourier(32, bandwidth=0.125)(8 * labels), small_labels)


def test_labels_are_embedded_with_magnitude_1_as_one_hot_vectors():
    torch.manual_seed(0)
    embedding, labels = MPLabelEmbedding(20, 3000), torch.arange(-1, 20)
    vectors = embedding(labels).vector
    assert_close(magnitude(vectors, 0), torch.ones(3000).double(), atol=1e-6, rtol=0)  # exactly
    assert_close(magnitude(vectors, 1), torch.ones(21).double(), atol=0.05, rtol=0)
    linear = MPLinear(21, 3000)
    linear.weight = embedding.weight
    one_hot = F.one_hot(labels % 21, 21).float()  # no class is the last
    assert_close(linear(math.sqrt(21) * one_hot), vectors)
    with pytest.raises(IndexError):
        embedding(torch.tensor([20]))


def test_a_new_network_has_unit_magnitude_in_every_block():
    network, magnitudes = new(model_channels=64, num_classes=None), {}
    for name, module in network.named_modules():
        if hasattr(module, "branch") or name == "conv_in":
            module.register_forward_hook(
                lambda _, __, output, name=name: magnitudes.update({name: magnitude(output)})
            )
    network(normal(64, 1, 16, 16), torch.linspace(0, 999, 64))
    assert len(magnitudes) == 11
    for name, value in magnitudes.items():
        assert value == pytest.approx(1, abs=0.15), name  # zeros at borders, attention


# Formulas


def test_a_convolution_is_a_loop_over_pixels():
    torch.manual_seed(0)
    conv, x = MPConv(3, 2, 3).double(), Z((2, 3, 4, 5), 1)
    padded, expected = F.pad(x, (1, 1, 1, 1)), torch.empty(2, 2, 4, 5).double()
    for out, weight in enumerate(conv.weight):
        unit = weight / weight.square().sum().sqrt()
        for i in range(4):
            for j in range(5):
                window = padded[:, :, i : i + 3, j : j + 3]
                expected[:, out, i, j] = (window * unit).sum((1, 2, 3))
    assert_close(conv(x), expected)


def test_attention_is_a_softmax_of_cosines():
    torch.manual_seed(0)
    attention, x = CosineAttention(8, num_heads=2).double(), Z((2, 8, 3, 3), 1)
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = (part.unflatten(2, (2, 4)) for part in attention.qkv(tokens).chunk(3, 2))
    q, k, v = (part / part.norm(dim=3, keepdim=True) for part in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(math.sqrt(4)).softmax(3)  # |q| |k| / 2
    heads = 2 * torch.einsum("bhqk,bkhd->bqhd", weights, v)
    branch = attention.proj(heads.flatten(2)).transpose(1, 2).reshape(x.shape)
    assert_close(attention(x), mp_sum(x, branch, 0.3))
    with torch.no_grad():
        attention.qkv.weight *= 5
    assert_close(attention(x), mp_sum(x, branch, 0.3))


def test_pixels_are_normalized_to_magnitude_1_and_zeros_stay_zeros():
    x = torch.cat([7 * normal(2, 8, 4, 4), torch.zeros(2, 8, 1, 4)], dim=2).requires_grad_()
    pixels = normalize(x, dim=1)
    assert_close(magnitude(pixels[:, :, :4], 1), torch.ones(2, 4, 4).double())
    assert not pixels[:, :, 4].any()
    assert torch.autograd.grad(pixels.sum(), x)[0].isfinite().all()
    assert normalize(x.bfloat16(), dim=1).dtype == torch.bfloat16


def test_a_network_of_zero_gains_outputs_zero_and_has_no_bias():
    network = new()
    assert not network(*batch(), condition("labels")).any()
    names = {name for name, parameter in network.named_parameters() if parameter.ndim < 2}
    assert {name.rsplit(".")[-1] for name in names} == {"out_gain", "emb_gain"}


def test_the_constant_channel_is_all_that_a_black_image_shows():
    network = small()
    with torch.no_grad():
        output = network(torch.zeros(4, 1, 8, 8), batch()[1])
        network.conv_in.weight[:, 1] = 0
        assert output.any()
        assert not network(torch.zeros(4, 1, 8, 8), batch()[1]).any()


@pytest.mark.parametrize("channels", MILLIONS)
def test_networks_of_the_paper_have_its_number_of_parameters(channels):
    with torch.device("meta"):
        network = MagnitudePreservingUNet(4, 4, 1.0, channels, num_classes=1000)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == MILLIONS[channels]


# Weights


def weights(network):
    return {name: p for name, p in network.named_parameters() if p.ndim > 1}


def assert_unit_rows(network, tolerance=1e-6):
    for name, weight in weights(network).items():
        rows = magnitude(weight.flatten(1), 1)
        assert_close(rows, torch.ones_like(rows), rtol=0, atol=tolerance, msg=name)


def test_the_scale_of_a_weight_changes_no_output_and_gradients_are_orthogonal_to_weights():
    network, inputs = small().double(), (*batch(torch.float64), condition("labels"))
    network.eval()
    output, grads = network(*inputs).detach(), gradients(network, *inputs)
    for name, weight in weights(network).items():
        rows, row_grads = weight.flatten(1), grads[name].flatten(1)
        cosine = F.cosine_similarity(rows, row_grads, dim=1)
        assert cosine.abs().max() < 1e-10, name
        assert row_grads.norm() > 1e-5, name
        scale = torch.linspace(0.1, 10, len(weight)).view(-1, *[1] * (weight.ndim - 1))
        with torch.no_grad():
            weight *= scale
    assert_close(network(*inputs), output, rtol=1e-10, atol=1e-10)
    rescaled = gradients(network, *inputs)
    for name, weight in weights(network).items():  # a large weight has a small gradient
        scale = torch.linspace(0.1, 10, len(weight)).view(-1, *[1] * (weight.ndim - 1))
        assert_close(rescaled[name] * scale, grads[name], rtol=1e-7, atol=1e-9)


def test_normalized_weights_have_magnitude_1_and_change_no_output_and_no_bit_the_second_time():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 0.03)):
        network = small().to(dtype).eval()
        inputs = batch(dtype)[0], batch()[1], condition("labels")
        for weight in weights(network).values():
            weight.data *= 3
        before = network(*inputs)
        network.normalize_weights()
        assert_close(network(*inputs), before, rtol=0, atol=100 * tolerance)
        assert_unit_rows(network, tolerance)
        once = copy.deepcopy(network.state_dict())
        network.normalize_weights()
        assert_same_bits(network.state_dict(), once)


def test_a_new_network_has_normalized_weights_and_frozen_weights_stay():
    network = new()
    assert_unit_rows(network)
    network.conv_in.requires_grad_(False)
    with torch.no_grad():
        network.conv_in.weight *= 2
        network.conv_out.weight *= 2
    network.normalize_weights()
    assert_close(magnitude(network.conv_in.weight).item(), 2.0)
    assert_close(magnitude(network.conv_out.weight).item(), 1.0)


def train(network, lr, steps):
    torch.manual_seed(0)
    make_optimizer = partial(torch.optim.Adam, lr=lr)
    optimizer = optimizer_and_schedule(network, make_optimizer, None, None)
    x, noise_label, labels = normal(16, 1, 8, 8), torch.linspace(0, 999, 16), torch.arange(16) % 10
    target = x.roll(1, 3) * labels.view(-1, 1, 1, 1) / 5
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (network(x, noise_label, labels) - target).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_weights_stay_on_their_sphere_at_a_high_lr():
    network = Patched(new(in_channels=4, out_channels=4))
    before = copy.deepcopy(network.state_dict())
    train(network, 0.1, 5)
    assert_unit_rows(network)
    assert not any(torch.equal(weight, before[name]) for name, weight in weights(network).items())


def test_averages_are_of_normalized_weights(tmp_path):
    module, ema = tiny_diffusion(network=new(out_channels=1, num_classes=3)), EMA((0.0,))
    make_trainer(tmp_path, ema).fit(module, images(8, 4))
    with ema.weights("ema"):
        assert_unit_rows(module.network)


@pytest.mark.slow
def test_activations_and_weights_stay_where_those_of_the_plain_unet_grow():
    plain = UNet(1, 1, 16, (1, 2), 1, (2,), norm_groups=4, num_classes=10)
    results = []
    for network, block in ((plain, "middle_block"), (new(out_channels=1), "middle_blocks.0")):
        activations = []
        network.get_submodule(block).register_forward_hook(
            lambda _, __, output, sizes=activations: sizes.append(magnitude(output).item())
        )
        before = torch.stack([weight.norm() for weight in weights(network).values()])
        loss = train(network, 0.03, 200)
        after = torch.stack([weight.norm() for weight in weights(network).values()])
        results.append((activations[-1], (after / before).median().item(), loss))
    (plain_size, plain_growth, _), (size, growth, loss) = results
    assert size == pytest.approx(1, abs=0.3)
    assert growth == pytest.approx(1, abs=0.1)
    assert loss < 0.01
    assert plain_size > 100
    assert plain_growth > 2


# With the rest of the library


def test_every_parameter_gets_a_gradient():
    for kind in ("labels", "none"):
        network = small() if kind == "labels" else small(num_classes=None)
        for name, gradient in gradients(network, *batch(), condition(kind)).items():
            assert gradient is not None, name
            assert gradient.norm() > 1e-4, name


def test_an_image_gets_its_own_noise_level_and_class():
    network = small().double()
    (x, noise_label), labels = batch(torch.float64), condition("labels")
    together = network(x, noise_label, labels)
    for i in range(4):
        alone = network(x[i : i + 1], noise_label[i : i + 1], labels[i : i + 1])
        assert_close(together[i : i + 1], alone, rtol=1e-10, atol=1e-10)
    none = network(x, noise_label)
    assert_close(network(x, noise_label, torch.full((4,), -1)), none)
    difference = (together - none).flatten(1).abs().amax(1)
    assert difference[0] < 1e-10
    assert difference[1:].min() > 1e-3


def test_gradient_checkpointing_and_dropout_change_no_bit_of_gradients():
    results = []
    for enabled in (False, True):
        network = small(gradient_checkpointing=enabled, dropout=0.3)
        torch.manual_seed(0)
        results.append(gradients(network, *batch(), condition("labels")))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_no_value_is_read_back_from_the_device():
    """The meta device has no values: a host synchronisation or a branch on data would raise."""
    with torch.device("meta"):
        network = MagnitudePreservingUNet(**SIZES)
        x, noise_label, labels = torch.zeros(4, 1, 8, 8), torch.zeros(4), torch.zeros(4).long()
    assert network(x, noise_label, labels).shape == (4, 2, 8, 8)


def test_bfloat16_autocast_is_close_and_weights_stay_float32():
    network, autocast = small(), small()
    expected = gradients(network, *batch(), condition("labels"))
    output = network(*batch(), condition("labels"))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = autocast(*batch(), condition("labels"))
    rounded.square().sum().backward()
    assert rounded.dtype == torch.float32
    assert 1e-4 < (rounded - output).norm() / output.norm() < 0.03
    for name, weight in weights(autocast).items():
        error = (weight.grad - expected[name]).norm() / expected[name].norm()
        assert error < 0.1, name
    assert_same_bits(weights(autocast), weights(network))


def test_a_bfloat16_network_is_close():
    x, noise_label = batch()
    expected = small()(x, noise_label, condition("labels"))
    output = small().bfloat16()(x.bfloat16(), noise_label, condition("labels"))
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 0.06 * expected.norm()


def test_every_block_keeps_channels_last_also_of_gradients():
    network, layouts = small().to(memory_format=torch.channels_last), {}

    def record(name, module, inputs, output):
        layouts[name] = output.is_contiguous(memory_format=torch.channels_last)

    for name, module in network.named_modules():
        if hasattr(module, "branch") or isinstance(module, MPConv):
            module.register_forward_hook(partial(record, name))
    x, noise_label = batch()
    output = network(x.contiguous(memory_format=torch.channels_last), noise_label)
    assert all(layouts.values()), layouts
    assert_close(output, small()(x, noise_label))
    weight = network.middle_blocks[0].branch.conv1.weight
    output.sum().backward()
    assert weight.stride() == weight.grad.stride() == (9 * 32, 1, 3 * 32, 32)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_torch_compile_captures_network_and_gradient_in_one_graph(checkpointing):
    network = small(
        gradient_checkpointing=checkpointing, channel_mult=(1,), attention_downsample=()
    )
    network, inputs = network.double(), (*batch(torch.float64), condition("labels"))
    expected, names = gradients(network, *inputs), list(network.state_dict())
    torch.compiler.reset()
    network.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    for name, gradient in gradients(network, *inputs).items():
        assert_close(gradient, expected[name], rtol=1e-8, atol=1e-8)
    assert list(network.state_dict()) == names


@pytest.mark.usefixtures("one_rank")
def test_it_trains_under_ddp():
    network, inputs = small(), (*batch(), condition("labels"))
    alone = gradients(network, *inputs)
    distributed = DistributedDataParallel(network)
    for name, gradient in gradients(distributed, *inputs).items():
        assert torch.equal(gradient, alone[name.removeprefix("module.")]), name


def on_two_ranks(folder):
    """Weights after fits with DDP and FSDP2."""
    results = []
    for strategy in ("ddp", ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)):
        module = tiny_diffusion(network=new(out_channels=1, num_classes=3))
        trainer = make_trainer(folder, devices=2, strategy=strategy, max_steps=3)
        trainer.fit(module, images(32, 4))
        is_split = strategy != "ddp"
        assert all(isinstance(p, DTensor) == is_split for p in module.parameters())
        whole = {n: p.full_tensor() if is_split else p for n, p in weights(module).items()}
        results.append(whole)
    return results


@pytest.mark.slow
def test_ranks_have_the_same_normalized_weights_also_if_they_are_split(tmp_path):
    ranks = spawn(on_two_ranks, 2, tmp_path)
    assert_same_bits(ranks[0], ranks[1])
    for whole, split in zip(*(results.values() for results in ranks[0]), strict=True):
        assert_close(split, whole, rtol=0, atol=1e-3)
        rows = magnitude(split.flatten(1), 1)
        assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-6)


def module_to_resume():
    module = small_unet()
    return tiny_diffusion(
        network=new(out_channels=1, dropout=0.1),
        num_classes=10,
        lr_scheduler=module._make_lr_scheduler,
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", TRAINER_SETTINGS)
def test_a_run_that_died_resumes_to_the_bit(tmp_path, settings):
    recipe = Recipe(("EMA", "MomentumDecay"), trainer=settings, module=module_to_resume)
    assert_undisturbed(tmp_path, recipe, 7)


def test_muon_updates_the_matrices_of_blocks():
    network = small()
    optimizer = MuonAdamW(network.parameters(), lr=0.1)
    optimizer.attach(network)
    muon, adamw = (group["params"] for group in optimizer.param_groups)
    names = {parameter: name for name, parameter in network.named_parameters()}
    assert {name.split(".")[0] for name in map(names.get, muon)} == {*network.block_names}
    outside = {names[parameter] for parameter in adamw if parameter.ndim > 1}
    layers = ("noise_linear", "label_emb", "conv_in", "conv_out")
    assert outside == {f"{layer}.weight" for layer in layers}


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_downsample": (4,)}, r"must be some of the downsampling factors \[1, 2\]"),
        ({"head_channels": 12}, "widths divisible by head_channels, got 32 channels"),
        ({"channel_mult": ()}, "the length of channel_mult must be above 0"),
        ({"dropout": 2.0}, r"dropout must be in \[0, 1\], got 2"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        new(**changes)


def test_inputs_that_do_not_fit_are_refused():
    network, noise_label = small(channel_mult=(1, 1, 1)), torch.zeros(2)
    with pytest.raises(ValueError, match="3 levels needs height and width divisible by 4"):
        network(torch.zeros(2, 1, 8, 6), noise_label)
    with pytest.raises(ValueError, match=r"takes labels \(B,\) int64 with B=2, got"):
        network(torch.zeros(2, 1, 8, 8), noise_label, torch.zeros(3).long())


def test_it_can_be_written_in_yaml():
    path = f"{MagnitudePreservingUNet.__module__}.{MagnitudePreservingUNet.__name__}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=nn.Module)
    config = {"network": {"class_path": path, "init_args": SIZES}}
    network = parser.instantiate(parser.parse_object(config)).network
    assert network(*batch(), condition("labels")).shape == (4, 2, 8, 8)


class Labels(EDMProcess):
    """EDMProcess with other noise labels."""

    def __init__(self, label):
        super().__init__()
        object.__setattr__(self, "noise_label", label)


@pytest.mark.parametrize(
    ("bandwidth", "process", "fits"),
    [
        (1.0, EDMProcess(), True),
        (0.005, DiscreteVP(LinearBetas(1000)), True),
        (0.005, EDMProcess(), False),
        (1.0, DiscreteVP(LinearBetas(1000)), False),
        (1.0, Labels(lambda t: -t.log() / 4), True),  # labels of a user's process may fall,
        (1.0, Labels(lambda t: 0 * t), True),  # be constant,
        (1.0, Labels(lambda t: (t / 80).logit()), True),  # or be infinite at an end
    ],
)
def test_a_bandwidth_that_hides_the_noise_level_is_not_trained(tmp_path, bandwidth, process, fits):
    """As with the arms edm and magnitude-preserving, each of which is right alone."""
    network = new(fourier_bandwidth=bandwidth, out_channels=1)
    module = tiny_diffusion(network=network, process=process, num_classes=10)
    trainer = make_trainer(tmp_path, max_steps=1)
    if fits:
        trainer.fit(module, images(4, 4))
        return
    with pytest.raises(ValueError, match=f"fourier_bandwidth={bandwidth} .* does not suit"):
        trainer.fit(module, images(4, 4))
