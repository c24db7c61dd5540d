import copy
import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from lit_diffusion.lab.analysis.common import compute_pieces, fingerprint, plan_analysis


def test_pieces_that_have_a_file_are_not_computed_again(tmp_path, capsys):
    names = []

    def compute(name):
        names.append(name)
        if names == ["a", "b"]:
            raise KeyboardInterrupt
        return {"values": np.array([ord(name)])}

    def pieces():
        arrays = compute_pieces(tmp_path, ["a", "b", "c"], compute, "piece")
        return [each["values"].item() for each in arrays]

    with pytest.raises(KeyboardInterrupt):
        pieces()
    assert "Stopped with 1 of 3 pieces" in capsys.readouterr().err
    assert pieces() == [97, 98, 99]
    assert names == ["a", "b", "b", "c"]


def plan(folder, num):
    return plan_analysis("test", Namespace(out=str(folder), device="cpu", num=num))


def test_a_folder_is_of_one_plan(tmp_path):
    for _ in range(2):
        assert plan(tmp_path / "out", 3) == tmp_path / "out"
    saved = json.loads((tmp_path / "out/plan.json").read_text())
    assert saved == {"analysis": "test", "of": [], "num": 3}
    with pytest.raises(ValueError, match="whose num is 3, but in this call it is 4; choose"):
        plan(tmp_path / "out", 4)
    with pytest.raises(ValueError, match="holds something else"):
        plan(tmp_path, 3)


def test_weights_have_a_fingerprint_whatever_their_layout_in_memory():
    usual = torch.nn.Conv2d(1, 4, 3)
    other = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    assert fingerprint(usual) == fingerprint(other)
    with torch.no_grad():
        other.weight[0, 0, 0, 0] += 1e-6
    assert fingerprint(usual) != fingerprint(other)
