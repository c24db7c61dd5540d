"""Files in the published layout, made of the names, shapes and outputs that references gave."""

import inspect

import pytest
import torch
from support.golden import Z, golden_weight, load, tensor
from torch.testing import assert_close

from lit_diffusion.interchange import load_network
from lit_diffusion.interchange.exported import build_network
from lit_diffusion.interchange.published import convert, infer, model_config
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import EncoderUNet, UNet

OLD, NEW = {"split_heads_first": True}, {"split_heads_first": False}
OVERRIDES = {
    "gd_A": OLD | {"num_heads": 4},
    "gd_A_neworder": NEW | {"num_heads": 4},
    "gd_B": NEW | {"head_channels": 32},
    "gd_C": OLD | {"head_channels": 16},
    "gd_classifier": OLD | {"head_channels": 32},
    "id_A": {"num_heads": 4},
    "id_B": {"num_heads": 2, "num_heads_upsample": 4},
    "uvit_uncond": {"num_heads": 4},
    "uvit_cond": {"num_heads": 2, "null_class": False},
    "uvit_cond_mlptime": {"num_heads": 3, "null_class": True},
}
KINDS = {"gd": "guided-diffusion", "id": "improved-diffusion", "uvit": "uvit"}


def case(tag):
    return "case09_uvit" if tag.startswith("uvit") else "case06_unet"


def published(tag):
    """A state_dict as the reference has it."""
    names, shapes = (load(case(tag))[f"{tag}/{what}"] for what in ("names", "shapes"))
    sizes = {str(n): tuple(int(k) for k in s if k) for n, s in zip(names, shapes, strict=True)}
    return {n: golden_weight(n, sizes[n], k).float() for k, n in enumerate(sorted(sizes))}


def recorded_input(tag, network):
    arrays = load(case(tag))
    uvit = tag.startswith("uvit")
    side, channels = (network.image_size, network.patch_embed.proj.in_channels) if uvit else (16, 3)
    x = Z((2, channels, side, side), 700 if uvit else 600).float()
    labels = [tensor(case(tag), f"{tag}/y")] if f"{tag}/y" in arrays else []
    return x, tensor(case(tag), f"{tag}/timesteps"), *labels


@pytest.mark.parametrize("tag", OVERRIDES)
def test_an_imported_network_gives_the_output_of_its_reference(tag, tmp_path):
    torch.save(published(tag), tmp_path / "published.pt")
    kind = KINDS[tag.split("_")[0]]
    spec = convert(tmp_path / "published.pt", kind, tmp_path / "out", OVERRIDES[tag])
    network = load_network(tmp_path / "out")
    model = model_config(spec)["init_args"]
    arguments = model["network"]["init_args"]
    assert arguments.keys() == inspect.signature(type(network)).parameters.keys()
    rebuilt = build_network(type(network), arguments)
    assert repr(rebuilt) == repr(network)
    assert model["num_classes"] == getattr(network, "num_classes", arguments["out_channels"])
    with torch.no_grad():
        output = network(*recorded_input(tag, network))
    expected = tensor(case(tag), f"{tag}/out_f32")
    assert expected.std() > 0.05
    assert_close(output, expected, rtol=1e-5, atol=2e-5)


def meta(make):
    with torch.device("meta"):
        return make().state_dict()


PUBLISHED = {
    "id lsun": (
        UNet,
        {"channel_mult": [1, 1, 2, 2, 4, 4], "attention_downsample": [16]}
        | {"num_heads": 1, "scale_shift_norm": False},
    ),
    "gd imagenet512": (
        UNet,
        {"model_channels": 256, "channel_mult": [0.5, 1, 1, 2, 2, 4, 4], "num_classes": 1000}
        | {"attention_downsample": [16, 32, 64], "resblock_updown": True, "in_channels": 6}
        | {"head_channels": 64, **OLD},
    ),
    "gd classifier128": (
        EncoderUNet,
        {"image_size": 128, "out_channels": 1000, "channel_mult": [1, 1, 2, 3, 4]}
        | {"attention_downsample": [4, 8, 16], "head_channels": 64, **OLD},
    ),
    "gd whose 480 / 352 * 352 is 479 in floats": (
        UNet,
        {"model_channels": 352, "channel_mult": [1, 1.3636363636363638], "num_res_blocks": 1}
        | {"attention_downsample": [2], **OLD},
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_arguments_of_published_networks_are_found(name):
    expected_class, arguments = PUBLISHED[name]
    arguments = {"in_channels": 3, "out_channels": 6, "num_heads": 4} | arguments
    if expected_class is EncoderUNet:
        arguments.pop("num_heads")
    required = ("num_heads", "head_channels", "split_heads_first")
    overrides = {name: arguments[name] for name in required if name in arguments}
    network_class, inferred = infer(
        meta(lambda: expected_class(**arguments)), KINDS[name.split()[0]], overrides
    )
    assert network_class is expected_class
    assert {name: inferred[name] for name in arguments} == arguments


@pytest.mark.parametrize("null_class", [True, False])
def test_the_last_row_of_labels_of_a_uvit_is_a_class_or_for_none(null_class):
    state, overrides = published("uvit_cond"), {"num_heads": 2, "null_class": null_class}
    network = build_network(*infer(state, "uvit", overrides))
    assert network.num_classes == len(state["label_emb.weight"]) - null_class


def test_the_arguments_of_a_dit_are_found():
    state = meta(lambda: DiT(32, 4, 8, 2, 1152, 28, 16, num_classes=1000))
    network_class, arguments = infer(state, "dit", {"num_heads": 16})
    sizes = {"image_size": 32, "in_channels": 4, "out_channels": 8, "patch_size": 2, "width": 1152}
    more = {"mlp_ratio": 4, "depth": 28, "num_classes": 1000, "num_heads": 16}
    assert (network_class, arguments) == (DiT, sizes | more)
    sizes = {"width": 352, "depth": 1, "num_heads": 4, "num_classes": 3, "mlp_ratio": 480.1 / 352}
    state = meta(lambda: DiT(8, 1, 1, **sizes))
    assert len(state["blocks.0.mlp.fc1.weight"]) == 480
    infer(state, "dit", {"num_heads": 4})  # although int(480 / 352 * 352) is 479


@pytest.mark.parametrize(
    ("tag", "kind", "missing", "message"),
    [
        (
            "id_A",
            "id",
            "num_heads",
            "num_heads cannot be inferred from shapes: pass --net",
        ),
        ("gd_classifier", "gd", "head_channels", "A classifier has 64"),
        ("uvit_cond", "uvit", "null_class", "the last row is for no class"),
        ("uvit_uncond", "gd", "num_heads", "is not of --kind guided-diffusion: it lacks input"),
    ],
)
def test_what_shapes_cannot_tell_is_asked_for(tag, kind, missing, message):
    overrides = {name: value for name, value in OVERRIDES[tag].items() if name != missing}
    with pytest.raises(ValueError, match=message):
        infer(published(tag), KINDS[kind], overrides)


def test_weights_that_the_architecture_has_not_are_named():
    with pytest.raises(ValueError, match=r"does not fit UNet\(.*Unexpected key.*wings.weight"):
        infer(published("id_A") | {"wings.weight": torch.ones(1)}, KINDS["id"], OVERRIDES["id_A"])
    with pytest.raises(ValueError, match=r"UNet cannot be built: .*'wings'"):
        infer(published("id_A"), KINDS["id"], OVERRIDES["id_A"] | {"wings": 2})


def test_a_number_of_a_block_is_no_number_of_blocks():
    """Counting up to it would not end."""
    state = published("id_A") | {f"input_blocks.{10**15}.0.weight": torch.ones(1)}
    with pytest.raises(ValueError, match="does not fit UNet"):
        infer(state, KINDS["id"], OVERRIDES["id_A"])
