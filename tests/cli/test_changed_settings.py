"""Pure parts; what a resume does to a run is in test_run.py."""

import pytest

from lit_diffusion.cli.changed_settings import differences

ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "betas": [0.9, 0.99]}}
MODEL = {"class_path": "A", "init_args": {"optimizer": ADAM, "sizes": (1, 2), "dropout": None}}


def changed(**init_args):
    return {"class_path": "A", "init_args": MODEL["init_args"] | init_args}


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (MODEL, {}),
        (changed(sizes=[1, 2]), {}),
        (changed(sizes=[1, 3]), {"model.sizes": ((1, 2), [1, 3])}),
        (changed(dropout=0.1), {"model.dropout": (None, 0.1)}),
        (
            changed(optimizer=ADAM | {"init_args": {"lr": 0.2, "betas": [0.9, 0.99]}}),
            {"model.optimizer.lr": (0.1, 0.2)},
        ),
        (
            changed(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}),
            {"model.optimizer": ("torch.optim.Adam", "torch.optim.SGD")},
        ),
        (changed(optimizer=None), {"model.optimizer": (ADAM, None)}),
        ({"class_path": "B", "init_args": {}}, {"model": ("A", "B")}),
        (changed(new_setting=3), {}),
    ],
)
def test_settings_that_differ_are_found_by_name(used, expected):
    assert differences(MODEL, used) == expected


def test_lists_of_as_many_objects_differ_in_the_settings_of_their_objects():
    """What only one of them has, as after an update that added an argument, is no difference."""
    old = [{"class_path": "EMA", "init_args": {"decays": [0.9]}}, {"class_path": "Grid"}]
    new = [
        {"class_path": "EMA", "init_args": {"decays": [0.5], "added": 1}},
        {"class_path": "Grid"},
    ]
    assert differences(old, new, "callbacks") == {"callbacks.0.decays": ([0.9], [0.5])}
    assert differences(old, new[:1], "callbacks") == {"callbacks": (old, new[:1])}
