from functools import cache

import pytest
import torch
from jsonargparse import ArgumentParser
from support.golden import Z, close, load, tensor
from support.golden_weights import fill_
from support.small_transformers import TAKES, batch, condition, no_condition, row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lit_diffusion.networks.layers import ResBlock
from lit_diffusion.networks.unet import EncoderUNet, UNet

TINY = {"model_channels": 64, "channel_mult": (1, 2), "num_res_blocks": 1}
GD_A = {**TINY, "resblock_updown": True, "num_classes": 5}
GOLDEN = {
    "gd_A": lambda: UNet(3, 6, **GD_A),
    "gd_A_neworder": lambda: UNet(3, 6, **GD_A, split_heads_first=False),
    "gd_B": lambda: UNet(
        3,
        3,
        model_channels=64,
        channel_mult=(1, 1, 2),
        num_res_blocks=2,
        attention_downsample=(2, 4),
        head_channels=32,
        scale_shift_norm=False,
        split_heads_first=False,
    ),
    "gd_C": lambda: UNet(
        3,
        6,
        model_channels=128,
        channel_mult=(0.5, 1),
        num_res_blocks=1,
        attention_downsample=(1, 2),
        head_channels=16,
        scale_shift_norm=False,
        resblock_updown=True,
    ),
    "gd_classifier": lambda: EncoderUNet(
        16, 3, 7, **TINY, attention_downsample=(2,), head_channels=32
    ),
    "id_A": lambda: UNet(3, 6, **TINY),
    "id_B": lambda: UNet(
        3,
        3,
        model_channels=64,
        channel_mult=(1, 1),
        num_res_blocks=2,
        attention_downsample=(1, 2),
        num_heads=2,
        num_heads_upsample=4,
        scale_shift_norm=False,
        num_classes=5,
    ),
}

ID_CIFAR10 = {"num_res_blocks": 3, "attention_downsample": (2, 4)}
ID_IMAGENET64 = {
    "channel_mult": (1, 2, 3, 4),
    "num_res_blocks": 3,
    "attention_downsample": (4, 8),
}
GD_IMAGENET256 = {
    "model_channels": 256,
    "channel_mult": (1, 1, 2, 2, 4, 4),
    "attention_downsample": (8, 16, 32),
    "head_channels": 64,
    "resblock_updown": True,
}
PUBLISHED = {
    "id_cifar10_learn_sigma": lambda: UNet(3, 6, **ID_CIFAR10),
    "id_cifar10_no_learn_sigma": lambda: UNet(3, 3, **ID_CIFAR10),
    "id_imagenet64_uncond_128ch": lambda: UNet(3, 6, **ID_IMAGENET64),
    "id_imagenet64_cond_192ch": lambda: UNet(
        3, 6, model_channels=192, num_classes=1000, **ID_IMAGENET64
    ),
    "id_lsun256": lambda: UNet(
        3,
        6,
        channel_mult=(1, 1, 2, 2, 4, 4),
        attention_downsample=(16,),
        num_heads=1,
        scale_shift_norm=False,
    ),
    "id_upsampler_64_256": lambda: UNet(
        6,
        6,
        model_channels=192,
        channel_mult=(1, 1, 2, 2, 4, 4),
        attention_downsample=(16, 32),
        num_classes=1000,
    ),
    "gd_imagenet64_cond": lambda: UNet(
        3,
        6,
        model_channels=192,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=3,
        attention_downsample=(2, 4, 8),
        head_channels=64,
        num_classes=1000,
        resblock_updown=True,
        split_heads_first=False,
    ),
    "gd_imagenet128_cond": lambda: UNet(
        3,
        6,
        model_channels=256,
        channel_mult=(1, 1, 2, 3, 4),
        attention_downsample=(4, 8, 16),
        num_classes=1000,
        resblock_updown=True,
    ),
    "gd_imagenet256_cond": lambda: UNet(3, 6, **GD_IMAGENET256, num_classes=1000),
    "gd_imagenet256_uncond": lambda: UNet(3, 6, **GD_IMAGENET256),
    "gd_imagenet512_cond": lambda: UNet(
        3,
        6,
        model_channels=256,
        channel_mult=(0.5, 1, 1, 2, 2, 4, 4),
        attention_downsample=(16, 32, 64),
        head_channels=64,
        num_classes=1000,
        resblock_updown=True,
    ),
    "gd_classifier128": lambda: EncoderUNet(
        128, 3, 1000, channel_mult=(1, 1, 2, 3, 4), attention_downsample=(4, 8, 16)
    ),
    "gd_classifier64_depth4": lambda: EncoderUNet(64, 3, 1000, num_res_blocks=4),
}


def golden_input(tag: str, dtype: torch.dtype) -> list:
    inputs = [
        Z((2, 3, 16, 16), 600).to(dtype),
        tensor("case06_unet", f"{tag}/timesteps"),
    ]
    if f"{tag}/y" in load("case06_unet"):
        inputs.append(tensor("case06_unet", f"{tag}/y"))
    return inputs


def shapes(network: nn.Module) -> dict:
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def golden_shapes(tag: str) -> dict:
    arrays = load("case06_unet")
    return {
        str(name): tuple(int(size) for size in shape if size)
        for name, shape in zip(arrays[f"{tag}/names"], arrays[f"{tag}/shapes"], strict=True)
    }


def digits_unet(**changes) -> UNet:
    """A small class-conditional network all of whose parameters matter."""
    arguments = {"model_channels": 32, "channel_mult": (1, 2), "num_res_blocks": 1}
    return fill_(UNet(1, 1, num_classes=10, **(arguments | changes)))


@cache
def digits_batch() -> tuple:
    return Z((4, 1, 8, 8), 3).float(), torch.tensor([0.0, 3.5, 500, 999]), torch.arange(4) - 1


def gradients(network: nn.Module, *inputs) -> dict:
    network.zero_grad()
    network(*inputs).square().sum().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("tag", GOLDEN)
def test_float64_output_is_that_of_the_reference(tag):
    # out_f64, not out_f64_emb32: the sinusoids are in float64 here.
    network = fill_(GOLDEN[tag]().double()).eval()
    with torch.no_grad():
        output = network(*golden_input(tag, torch.float64))
    close(output, tensor("case06_unet", f"{tag}/out_f64"))


@pytest.mark.parametrize("tag", GOLDEN)
def test_float32_output_is_that_of_the_reference(tag):
    network = fill_(GOLDEN[tag]()).eval()
    with torch.no_grad():
        output = network(*golden_input(tag, torch.float32))
    assert_close(output, tensor("case06_unet", f"{tag}/out_f32"), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tag", GOLDEN)
def test_parameters_have_the_names_and_shapes_of_the_reference(tag):
    assert shapes(GOLDEN[tag]()) == golden_shapes(tag)


def test_the_published_cifar10_checkpoint_fits():
    with torch.device("meta"):
        network = PUBLISHED["id_cifar10_learn_sigma"]()
    assert shapes(network) == golden_shapes("id_cifar10")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        network = PUBLISHED[name]()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == load("param_counts")[name]


def test_no_value_is_read_back_from_the_device():
    """The meta device has no values: a host synchronisation or a branch on data would raise."""
    with torch.device("meta"):
        network = digits_unet(gradient_checkpointing=True)
        output = network(torch.randn(4, 1, 8, 8), torch.rand(4), torch.zeros(4, dtype=torch.int64))
        output.sum().backward()
    assert output.shape == (4, 1, 8, 8)


def test_a_new_network_says_nothing():
    x, noise_label, labels = digits_batch()
    output = UNet(1, 2, model_channels=32, num_classes=10)(x, noise_label, labels)
    assert torch.equal(output, torch.zeros(4, 2, 8, 8))


@pytest.mark.parametrize("tag", GOLDEN)
def test_every_parameter_gets_a_gradient(tag):
    for name, gradient in gradients(
        fill_(GOLDEN[tag]()), *golden_input(tag, torch.float32)
    ).items():
        assert gradient is not None, name
        assert gradient.norm() > 1e-3, name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_no_bit(dropout):
    results = []
    for gradient_checkpointing in (False, True):
        network = digits_unet(dropout=dropout, gradient_checkpointing=gradient_checkpointing)
        torch.manual_seed(0)
        results.append(gradients(network, *digits_batch()))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_gradient_checkpointing_computes_every_block_twice():
    network, calls = digits_unet(gradient_checkpointing=True), []
    blocks = [module for module in network.modules() if isinstance(module, ResBlock)]
    for block in blocks:
        block.register_forward_pre_hook(lambda block, args: calls.append(block))
    gradients(network, *digits_batch())
    assert sorted(map(id, calls)) == sorted(2 * [id(block) for block in blocks])


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("with_labels", [True, False])
def test_checkpointed_network_trains_under_ddp_without_unused_parameters(with_labels):
    x, noise_label, labels = digits_batch()
    inputs = (x, noise_label, labels if with_labels else None)
    network = digits_unet(gradient_checkpointing=True)
    alone = gradients(network, *inputs)
    distributed = DistributedDataParallel(network)
    gradients(distributed, *inputs)  # DDP misses a gradient at the next forward pass only
    for name, gradient in gradients(distributed, *inputs).items():
        assert torch.equal(gradient, alone[name.removeprefix("module.")]), name


def test_dropout_acts_in_training_only():
    network, inputs = digits_unet(dropout=0.5), digits_batch()
    assert not torch.equal(network(*inputs), network(*inputs))
    network.eval()
    assert torch.equal(network(*inputs), network(*inputs))


@pytest.mark.parametrize("tag", ["gd_A", "gd_B", "gd_C", "id_B"])
def test_channels_last_changes_the_memory_format_alone(tag):
    network = fill_(GOLDEN[tag]().double())
    x, *rest = golden_input(tag, torch.float64)
    expected = network(x, *rest)
    network = network.to(memory_format=torch.channels_last)
    output = network(x.to(memory_format=torch.channels_last), *rest)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert_close(output, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tag", GOLDEN)
def test_bfloat16_autocast_is_close_and_returns_float32(tag):
    network = fill_(GOLDEN[tag]()).eval()
    inputs = golden_input(tag, torch.float32)
    expected = network(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = network(*inputs)
    assert output.dtype == torch.float32
    assert (output - expected).norm() < 0.02 * expected.norm()


def test_a_bfloat16_network_is_close():
    x, *rest = digits_batch()
    expected = digits_unet()(x, *rest)
    output = digits_unet().bfloat16()(x.bfloat16(), *rest)
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 0.03 * expected.norm()


def test_label_minus_one_is_the_network_without_a_class():
    network = digits_unet()
    x, noise_label, _ = digits_batch()
    none = network(x, noise_label, torch.full((4,), -1))
    assert torch.equal(network(x, noise_label), none)
    network.label_emb.weight.data.zero_()
    assert torch.equal(network(x, noise_label, torch.tensor([3, 1, 4, 1])), none)


def test_an_image_is_told_its_own_label():
    network = digits_unet().double()
    x, noise_label, labels = digits_batch()
    together = network(x.double(), noise_label, labels)
    for i in range(4):
        alone = network(x[i : i + 1].double(), noise_label[i : i + 1], labels[i : i + 1])
        assert_close(together[i : i + 1], alone, rtol=1e-10, atol=1e-10)


def test_only_the_classes_in_the_batch_get_a_gradient():
    x, noise_label, _ = digits_batch()
    labels = torch.tensor([-1, 7, -1, 2])
    gradient = gradients(digits_unet(), x, noise_label, labels)["label_emb.weight"]
    assert gradient.norm(dim=1).nonzero().flatten().tolist() == [2, 7]


def test_one_step_of_training_tells_classes_and_no_class_apart():
    torch.manual_seed(0)
    network = UNet(1, 1, model_channels=32, channel_mult=(1, 2), num_classes=10)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, noise_label, labels = digits_batch()
    for _ in range(2):  # the first moves the zero-initialised output alone
        optimizer.zero_grad()
        (network(x, noise_label, labels) - labels.view(-1, 1, 1, 1)).square().mean().backward()
        optimizer.step()
    outputs = [network(x[:1], noise_label[:1], torch.tensor([label])) for label in (-1, 0, 1)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[a] - outputs[b]).abs().max() > 1e-3


def test_an_unconditional_network_refuses_labels():
    with pytest.raises(ValueError, match=r"UNet without num_classes, .* got torch.int64 \(4,\)"):
        UNet(1, 1, model_channels=32)(*digits_batch())


@pytest.mark.parametrize("size", [(10, 8), (8, 12)])
def test_images_that_cannot_be_halved_are_refused(size):
    network = UNet(1, 1, model_channels=32, channel_mult=(1, 2, 2, 2))
    with pytest.raises(ValueError, match=r"4 levels needs height and width divisible by 8"):
        network(torch.zeros(2, 1, *size), torch.zeros(2))


def test_the_classifier_refuses_images_of_another_size():
    network = EncoderUNet(16, 3, 7, **TINY, attention_downsample=(2,))
    with pytest.raises(ValueError, match=r"image_size=16\) got images of shape \(2, 3, 32, 32\)"):
        network(torch.zeros(2, 3, 32, 32), torch.zeros(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_downsample": (3,)}, r"attention_downsample=\(3,\) .* \[1, 2, 4, 8\]"),
        ({"num_heads": 5}, "64 channels and num_heads=5"),
        ({"num_heads": 0}, "64 channels and num_heads=0"),
        ({"head_channels": 48}, "64 channels and head_channels=48"),
        ({"model_channels": 48}, "48 channels and 32 groups"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        UNet(1, 1, **({"model_channels": 32} | arguments))


def test_a_network_can_be_written_in_yaml():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=nn.Module)
    text = """
        class_path: lit_diffusion.networks.unet.UNet
        init_args: {in_channels: 3, out_channels: 6, model_channels: 128, channel_mult: [0.5, 1],
                    num_res_blocks: 1, attention_downsample: [1, 2], head_channels: 16,
                    scale_shift_norm: false, resblock_updown: true}
    """
    network = parser.instantiate(parser.parse_args([f"--network={text}"])).network
    assert shapes(network) == golden_shapes("gd_C")


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_torch_compile_captures_the_whole_network_in_one_graph(gradient_checkpointing):
    network = digits_unet(gradient_checkpointing=gradient_checkpointing).double()
    x, noise_label, labels = digits_batch()
    inputs = (x.double(), noise_label, labels)
    expected = gradients(network, *inputs)
    network.compile(fullgraph=True, backend="aot_eager")
    for name, gradient in gradients(network, *inputs).items():
        assert_close(gradient, expected[name], rtol=1e-8, atol=1e-8)
    assert shapes(network) == shapes(digits_unet())


@pytest.mark.parametrize(
    "sizes", [{"model_channels": 10**9}, {"num_res_blocks": 10**9}, {"channel_mult": [1] * 10**5}]
)
def test_sizes_that_would_fill_the_memory_are_refused_by_name(sizes):
    with pytest.raises(ValueError, match="|".join(sizes)):
        UNet(1, 1, **{"model_channels": 8, "norm_groups": 4} | sizes)


# Conditions that are no classes


def conditioned(kind, **changes):
    """All of its parameters matter."""
    arguments = {"model_channels": 32, "channel_mult": (1, 2), "num_res_blocks": 1}
    return fill_(UNet(1, 2, **(arguments | TAKES[kind] | changes))).double()


def in_double(condition):
    if isinstance(condition, torch.Tensor):
        return condition
    return tuple(part.double() if part.is_floating_point() else part for part in condition)


@pytest.mark.parametrize("kind", ["tokens", "vectors", "words"])
def test_each_image_is_told_its_own_condition_and_none_where_there_is_none(kind):
    network, (x, noise_label) = conditioned(kind), batch(torch.float64)
    told, none = in_double(condition(kind)), in_double(no_condition(kind))
    output, without = network(x, noise_label, told), network(x, noise_label, none)
    assert_close(network(x, noise_label, None), without, rtol=1e-12, atol=1e-12)
    assert_close(output[0], without[0], rtol=1e-12, atol=1e-12)  # the first has none
    assert ((output - without)[1:].flatten(1).abs().max(1).values > 1e-3).all()
    for i in range(4):
        alone = network(x[i : i + 1], noise_label[i : i + 1], row(told, i))
        assert_close(alone[0], output[i], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_what_is_masked_changes_nothing_even_if_it_is_no_number(kind):
    network, (x, noise_label) = conditioned(kind), batch(torch.float64)
    values, there = in_double(condition(kind))
    mask = there.reshape(*there.shape, 1)
    outputs = [
        network(x, noise_label, (values.masked_fill(~mask, other), there))
        for other in (0.0, float("nan"))
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kind", ["tokens", "vectors", "words"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_parameter_that_reads_a_condition_gets_a_gradient(kind, checkpointed):
    network = conditioned(kind, gradient_checkpointing=checkpointed)
    x, noise_label = batch(torch.float64)
    network(x, noise_label, in_double(condition(kind))).square().sum().backward()
    assert [name for name, p in network.named_parameters() if not p.grad.abs().max() > 0] == []


@pytest.mark.parametrize("kind", ["tokens", "words"])
def test_tokens_are_attended_to_on_the_levels_that_have_attention(kind):
    parameters = dict(conditioned(kind, attention_downsample=(1,)).named_parameters())
    reading = {name.rpartition(".kv.")[0] for name in parameters if ".kv." in name}
    assert reading == {
        *("input_blocks.1.2", "middle_block.2"),
        *("output_blocks.2.2", "output_blocks.3.2"),
    }


def test_a_network_takes_one_kind_of_condition():
    with pytest.raises(ValueError, match="one kind of condition, got num_classes=3 and"):
        UNet(1, 1, model_channels=32, num_classes=3, context_dim=4)
    with pytest.raises(ValueError, match="got num_classes=3 and num_words=4: leave all but one"):
        UNet(1, 1, model_channels=32, num_classes=3, num_words=4)
    network, (x, noise_label) = conditioned("tokens"), batch(torch.float64)
    with pytest.raises(ValueError, match=r"UNet takes \(tokens \(B, L, 6\), mask \(B, L\) bool\)"):
        network(x, noise_label, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match=r"num_classes=10 takes labels \(B,\) int64"):
        conditioned("labels")(x, noise_label, in_double(condition("tokens")))
