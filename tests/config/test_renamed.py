import pytest

from lit_diffusion.config.renamed import rename_checkpoint, rename_config

NONE = {"context_dim": None, "vector_dim": None, "num_words": None}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_classes": 10, **NONE}, {"num_classes": 10}),
        ({"num_classes": None, **NONE, "context_dim": 6}, ("Tokens", {"dim": 6})),
        ({"num_classes": None, **NONE, "vector_dim": 6}, ("Vectors", {"dim": 6})),
        ({"num_words": 17}, ("WordIds", {"num_words": 17})),
        ({"num_classes": 6, "null_class": True}, {"num_classes": 6}),
        (
            {"num_classes": 6, "null_class": False, **NONE},
            ("Classes", {"num_classes": 6, "null_class": False}),
        ),
        # what a module hands down is not here: the parser refuses null_class by its name
        ({"num_classes": None, "null_class": False}, {"null_class": False}),
    ],
)
@pytest.mark.parametrize("network", ["unet.UNet", "uvit.UViT", "dit.DiT", "jit.JiT"])
def test_four_arguments_of_networks_are_one_condition(network, arguments, expected):
    if isinstance(expected, tuple):
        kind, sizes = expected
        class_path = f"lit_diffusion.networks.conditions.{kind}"
        expected = {"condition": {"class_path": class_path, "init_args": sizes}}
    for path in (f"lit_diffusion.networks.{network}", network.partition(".")[2]):
        config = rename_config({"class_path": path, "init_args": arguments})
        renamed = {key: value for key, value in config["init_args"].items() if value is not None}
        assert renamed == expected
        assert rename_config(config) == config


def test_classes_of_others_are_left_alone():
    foreign = {"class_path": "mine.UNet", "init_args": {"num_words": 3}}
    assert rename_config(foreign) == foreign


def test_classes_that_moved_are_renamed_wherever_they_are_named():
    old = {"network": [{"class_path": "lit_diffusion.networks.patched.Patched"}]}
    new = {"network": [{"class_path": "lit_diffusion.networks.layers.Patched"}]}
    assert rename_config(old) == new
    checkpoint = {"state_dict": {"a": 1}, "hyper_parameters": old}
    assert rename_checkpoint(checkpoint) == {"state_dict": {"a": 1}, "hyper_parameters": new}
