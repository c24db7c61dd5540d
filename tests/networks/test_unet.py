import copy

import pytest
import torch
from support.golden import Z, close, fill_, load, tensor
from support.small_networks import batch, condition, gradients, small
from torch.nn.parallel import DistributedDataParallel

from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.protocols import by_part

TINY = {"model_channels": 64, "channel_mult": (1, 2), "num_res_blocks": 1}
GD_A = {**TINY, "resblock_updown": True, "num_classes": 5}
GD_B = {"model_channels": 64, "channel_mult": (1, 1, 2), "attention_downsample": (2, 4)}
GD_B |= {"head_channels": 32, "scale_shift_norm": False, "split_heads_first": False}
GD_C = {"model_channels": 128, "channel_mult": (0.5, 1), "num_res_blocks": 1}
GD_C |= {"attention_downsample": (1, 2), "head_channels": 16, "scale_shift_norm": False}
ID_B = {"model_channels": 64, "channel_mult": (1, 1), "attention_downsample": (1, 2)}
ID_B |= {"num_heads": 2, "num_heads_upsample": 4, "scale_shift_norm": False, "num_classes": 5}
GOLDEN = {
    "gd_A": lambda: UNet(3, 6, **GD_A),
    "gd_A_neworder": lambda: UNet(3, 6, **GD_A, split_heads_first=False),
    "gd_B": lambda: UNet(3, 3, **GD_B),
    "gd_C": lambda: UNet(3, 6, **GD_C, resblock_updown=True),
    "gd_classifier": lambda: EncoderUNet(
        16, 3, 7, **TINY, attention_downsample=(2,), head_channels=32
    ),
    "id_A": lambda: UNet(3, 6, **TINY),
    "id_B": lambda: UNet(3, 3, **ID_B),
}

CLASSES, WIDE = {"num_classes": 1000}, {"model_channels": 192}
ID_CIFAR10 = {"num_res_blocks": 3, "attention_downsample": (2, 4)}
ID_IMAGENET64 = {"channel_mult": (1, 2, 3, 4), "num_res_blocks": 3, "attention_downsample": (4, 8)}
ID_LSUN256 = {"channel_mult": (1, 1, 2, 2, 4, 4), "attention_downsample": (16,)}
GD_IMAGENET64 = {"channel_mult": (1, 2, 3, 4), "num_res_blocks": 3}
GD_IMAGENET64 |= {"attention_downsample": (2, 4, 8), "head_channels": 64, "resblock_updown": True}
GD_IMAGENET256 = {"model_channels": 256, "channel_mult": (1, 1, 2, 2, 4, 4)}
GD_IMAGENET256 |= {"attention_downsample": (8, 16, 32), "head_channels": 64}
GD_IMAGENET512 = {"model_channels": 256, "channel_mult": (0.5, 1, 1, 2, 2, 4, 4)}
GD_IMAGENET512 |= {"attention_downsample": (16, 32, 64), "head_channels": 64}
PUBLISHED = {
    "id_cifar10_learn_sigma": lambda: UNet(3, 6, **ID_CIFAR10),
    "id_imagenet64_cond_192ch": lambda: UNet(3, 6, **ID_IMAGENET64, **WIDE, **CLASSES),
    "id_lsun256": lambda: UNet(3, 6, **ID_LSUN256, num_heads=1, scale_shift_norm=False),
    "gd_imagenet64_cond": lambda: UNet(3, 6, **GD_IMAGENET64, **WIDE, **CLASSES),
    "gd_imagenet256_uncond": lambda: UNet(3, 6, **GD_IMAGENET256, resblock_updown=True),
    "gd_imagenet512_cond": lambda: UNet(3, 6, **GD_IMAGENET512, **CLASSES, resblock_updown=True),
    "gd_classifier128": lambda: EncoderUNet(
        128, 3, 1000, channel_mult=(1, 1, 2, 3, 4), attention_downsample=(4, 8, 16)
    ),
    "gd_classifier64_depth4": lambda: EncoderUNet(64, 3, 1000, num_res_blocks=4),
}


@pytest.mark.parametrize("tag", GOLDEN)
def test_float64_output_is_that_of_the_reference(tag):
    """Its names, shapes and float32 output are in tests/interchange/test_published.py."""
    # out_f64, not out_f64_emb32: the sinusoids are in float64 here.
    network = fill_(GOLDEN[tag]().double()).eval()
    arrays = load("case06_unet")
    inputs = [
        tensor("case06_unet", f"{tag}/{x}") for x in ("timesteps", "y") if f"{tag}/{x}" in arrays
    ]
    with torch.no_grad():
        output = network(Z((2, 3, 16, 16), 600), *inputs)
    close(output, tensor("case06_unet", f"{tag}/out_f64"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        network = PUBLISHED[name]()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == load("param_counts")[name]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("with_labels", [True, False])
def test_checkpointed_network_trains_under_ddp_without_unused_parameters(with_labels):
    inputs = (*batch(), condition("labels") if with_labels else None)
    network = small("unet", gradient_checkpointing=True)
    alone = gradients(network, *inputs)
    distributed = DistributedDataParallel(network)
    gradients(distributed, *inputs)  # DDP misses a gradient at the next forward pass only
    for name, gradient in gradients(distributed, *inputs).items():
        assert torch.equal(gradient, alone[name.removeprefix("module.")]), name


def test_dropout_acts_in_training_only():
    network, inputs = small("unet", dropout=0.5), (*batch(), condition("labels"))
    assert not torch.equal(network(*inputs), network(*inputs))
    network.eval()
    assert torch.equal(network(*inputs), network(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("changes", [{}, {"resblock_updown": True, "scale_shift_norm": False}])
def test_a_gpu_computes_outputs_and_gradients_of_the_cpu(changes, dtype, monkeypatch):
    """Where convolutions leave their bias to the norm, which in float32 is a kernel of our own."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network, inputs = small("unet", "none", **changes).double(), batch(torch.float64)
    expected = {"output": network(*inputs), **gradients(network, *inputs)}
    network = copy.deepcopy(network).to("cuda", dtype, memory_format=torch.channels_last)
    x, noise_label = (t.cuda() for t in inputs)
    x = x.to(dtype, memory_format=torch.channels_last)
    actual = {"output": network(x, noise_label), **gradients(network, x, noise_label)}
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for name, value in expected.items():
        assert (actual[name].cpu() - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["none", "tokens"])
@pytest.mark.parametrize("changes", [{}, {"resblock_updown": True, "scale_shift_norm": False}])
def test_every_layer_keeps_channels_last(changes, kind, device):
    network = small("unet", kind, **changes).to(device, memory_format=torch.channels_last)
    layouts = {}

    def record(module, inputs, output):
        if isinstance(output, torch.Tensor) and output.ndim == 4:
            layouts[module] = output.is_contiguous(memory_format=torch.channels_last)

    for module in network.modules():
        module.register_forward_hook(record)
    x, noise_label, rows = (by_part(lambda t: t.to(device), p) for p in (*batch(), condition(kind)))
    with torch.autocast(device, torch.bfloat16):
        network(x.to(memory_format=torch.channels_last), noise_label, rows)
    assert len(layouts) > 20
    assert [module for module, is_channels_last in layouts.items() if not is_channels_last] == []


@pytest.mark.parametrize("size", [(10, 8), (8, 12)])
def test_images_of_other_sizes_are_refused(size):
    network = UNet(1, 1, model_channels=32, channel_mult=(1, 2, 2, 2))
    with pytest.raises(ValueError, match=r"4 levels needs height and width divisible by 8"):
        network(torch.zeros(2, 1, *size), torch.zeros(2))
    classifier = EncoderUNet(16, 3, 7, **TINY, attention_downsample=(2,))
    with pytest.raises(ValueError, match=r"image_size=16\) got images of shape \(2, 3"):
        classifier(torch.zeros(2, 3, *size), torch.zeros(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_downsample": (3,)}, r"attention_downsample=\(3,\) .* \[1, 2, 4, 8\]"),
        ({"num_heads": 0}, "64 channels and num_heads=0"),
        ({"head_channels": 48}, "64 channels and head_channels=48"),
        ({"model_channels": 48}, "48 channels and 32 groups"),
        ({"channel_mult": (1, 0.03)}, "at least 1, got 0.03 x 32"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        UNet(1, 1, **({"model_channels": 32} | arguments))


@pytest.mark.parametrize(
    "sizes", [{"model_channels": 10**9}, {"num_res_blocks": 10**9}, {"channel_mult": [1] * 10**5}]
)
def test_sizes_that_would_fill_the_memory_are_refused_by_name(sizes):
    with pytest.raises(ValueError, match="|".join(sizes)):
        UNet(1, 1, **{"model_channels": 8, "norm_groups": 4} | sizes)


@pytest.mark.parametrize("kind", ["tokens", "words"])
def test_tokens_are_attended_to_on_the_levels_that_have_attention(kind):
    parameters = dict(small("unet", kind, attention_downsample=(1,)).named_parameters())
    reading = {name.rpartition(".kv.")[0] for name in parameters if ".kv." in name}
    assert reading == {
        *("input_blocks.1.2", "middle_block.2"),
        *("output_blocks.2.2", "output_blocks.3.2"),
    }
