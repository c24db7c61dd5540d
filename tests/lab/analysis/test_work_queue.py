import json

import numpy as np
import pytest

from lit_diffusion.lab.analysis.work_queue import compute_pieces, prepare_folder

NAMES = ["a", "b", "c"]


def array_of(name):
    return {"values": np.array([float(ord(name))])}


def values(found):
    return [float(each["values"][0]) for each in found]


def test_pieces_that_are_there_are_not_made_again(tmp_path):
    made = []

    def make(name):
        made.append(name)
        if name == "b" and made.count("b") == 1:
            raise KeyboardInterrupt
        return array_of(name)

    prepare_folder(tmp_path / "out", {"kind": "test"})
    with pytest.raises(KeyboardInterrupt):
        compute_pieces(tmp_path / "out", NAMES, make, "piece")
    assert values(compute_pieces(tmp_path / "out", NAMES, make, "piece")) == [97, 98, 99]
    assert made == ["a", "b", "b", "c"]


def test_processes_share_them(tmp_path, monkeypatch):
    prepare_folder(tmp_path / "out", {"kind": "test"})
    made = []

    def make(name):
        made.append(name)
        return array_of(name)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert compute_pieces(tmp_path / "out", NAMES, make, "piece") is None
    assert made == ["b"]
    monkeypatch.setenv("RANK", "0")
    assert values(compute_pieces(tmp_path / "out", NAMES, make, "piece")) == [97, 98, 99]
    assert made == ["b", "a", "c"]


def test_a_folder_is_of_one_plan(tmp_path):
    prepare_folder(tmp_path / "out", {"kind": "test", "num": 3})
    prepare_folder(tmp_path / "out", {"kind": "test", "num": 3})
    assert json.loads((tmp_path / "out/plan.json").read_text()) == {"kind": "test", "num": 3}
    with pytest.raises(ValueError, match="whose num is 3, and this call's is 4; choose another"):
        prepare_folder(tmp_path / "out", {"kind": "test", "num": 4})
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    with pytest.raises(ValueError, match="holds something else"):
        prepare_folder(tmp_path / "other", {"kind": "test"})
