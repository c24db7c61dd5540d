import copy

import pytest
import torch

from lit_diffusion.callbacks.parts.averages import Group
from lit_diffusion.checkpoints.averages import Averaged, check_averages, pack, unpack

SOUND = {
    "decays": [0.9, 0.5],
    "steps": {"a": 3, "b": 0},
    "shadows": [{"a": torch.zeros(2), "b": torch.zeros(1)} for _ in range(2)],
}
EDITS = {
    "decays must be": [
        lambda s: s.update(decays=[float("nan"), 0.5]),
        lambda s: s.update(decays=[1.5, 0.5]),
        lambda s: s.update(decays=["a", 0.5]),
        lambda s: s.update(decays=[]),
        lambda s: s.update(decays=7),
    ],
    "steps must be": [
        lambda s: s["steps"].update(a=-10),
        lambda s: s["steps"].update(a="a"),
        lambda s: s["steps"].update(a=None),
        lambda s: s.update(steps=[3, 0]),
    ],
    "average of each parameter": [
        lambda s: s["steps"].update(c=3),
        lambda s: s["steps"].pop("a"),
        lambda s: s["shadows"][1].pop("a"),
        lambda s: s["shadows"].__setitem__(1, None),
    ],
    "differ in shape": [lambda s: s["shadows"][1].update(a=torch.zeros(3))],
    "of real numbers": [
        lambda s: s["shadows"][1].update(a=torch.zeros(2, dtype=torch.int64)),
        lambda s: s["shadows"][1].update(a=torch.zeros(2, dtype=torch.bool)),
        lambda s: s["shadows"][0].update(a="text"),
        lambda s: s["shadows"][0].update(a=torch.zeros(2).to_sparse()),
    ],
    "for each decay": [lambda s: s["shadows"].pop(), lambda s: s.update(shadows=None)],
    "snapshots must be hashes": [
        lambda s: s.update(snapshots={"a": "b"}),
        lambda s: s.update(snapshots={4: 5}),
        lambda s: s.update(snapshots=None),
    ],
    "must hold decays, steps": [lambda s: s.pop("steps"), lambda s: s.pop("decays")],
}


def test_what_an_ema_saves_passes():
    check_averages({})
    check_averages(SOUND)


@pytest.mark.parametrize(("reason", "edit"), [(r, e) for r, all_ in EDITS.items() for e in all_])
def test_anything_else_is_refused(reason, edit):
    state = copy.deepcopy(SOUND)
    edit(state)
    with pytest.raises(ValueError, match=reason):
        check_averages(state)


def test_what_is_no_dict_is_refused():
    for state in (None, [], "text", 7):
        with pytest.raises(ValueError, match="must hold decays"):
            check_averages(state)


def parameters(**values):
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


def test_a_new_decay_starts_from_the_weights_and_others_go_on():
    averages = {"w": Averaged(5, [torch.tensor([1.0]), torch.tensor([2.0])])}
    params = parameters(w=torch.tensor([9.0]))
    state = pack(averages, (0.9, 0.99))
    known = unpack(state, (0.99, 0.5, 0.4), params)["w"]
    group = Group((0.99, 0.5, 0.4))
    group.add("w", params["w"], known)
    assert [column[0].item() for column in group.shadows] == [2.0, 1.0, 9.0]
    assert known.steps == 5


@pytest.mark.parametrize(
    "params", [parameters(v=torch.zeros(1)), parameters(w=torch.zeros(2))], ids=["name", "shape"]
)
def test_an_average_that_does_not_fit_is_refused_by_name(params):
    state = pack({"w": Averaged(5, [torch.zeros(1)])}, (0.9,))
    with pytest.raises(ValueError, match="'w'"):
        unpack(state, (0.9,), params)
