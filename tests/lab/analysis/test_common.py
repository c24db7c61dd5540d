import copy
import json
import os
import signal

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lit_diffusion.files import atomic_write
from lit_diffusion.lab.analysis.command import AnalysisOptions
from lit_diffusion.lab.analysis.common import (
    UnfinishedAnalysis,
    compute_pieces,
    fingerprint,
    plan_analysis,
    save_figure,
)

NAMES = ["a", "b", "c"]


class Work:
    """Computes the code of a letter, and counts how often."""

    def __init__(self):
        self.names = []

    def __call__(self, name):
        self.names.append(name)
        if self.names == ["a", "b"]:
            raise KeyboardInterrupt
        return {"values": np.array([ord(name)])}

    def in_folder(self, folder):
        return [each["values"].item() for each in compute_pieces(folder, NAMES, self, "piece")]


def test_pieces_that_have_a_file_are_not_computed_again(tmp_path, capsys):
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        work.in_folder(tmp_path)
    assert "Stopped with 1 of 3 pieces" in capsys.readouterr().err
    assert work.in_folder(tmp_path) == [97, 98, 99]
    assert work.names == ["a", "b", "b", "c"]
    (tmp_path / "pieces/b.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"b\.npz is damaged"):
        work.in_folder(tmp_path)


def test_a_killed_process_leaves_nothing_after_the_next_one(tmp_path):
    """The child is killed while it writes a piece, whose file it has locked."""
    (tmp_path / "pieces").mkdir()
    piece = tmp_path / "pieces" / "b.npz"
    if (child := os.fork()) == 0:
        with atomic_write(piece, shared=True):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (part,) = (tmp_path / "pieces").iterdir()
    os.utime(part, (0, 0))
    assert compute_pieces(tmp_path, ["b"], lambda name: {"values": np.ones(1)}, "piece")
    assert os.listdir(tmp_path / "pieces") == ["b.npz"]


def test_processes_share_them(tmp_path, monkeypatch):
    work = Work()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UnfinishedAnalysis):
        work.in_folder(tmp_path)
    assert work.names == ["b"]
    monkeypatch.setenv("RANK", "0")
    assert work.in_folder(tmp_path) == [97, 98, 99]
    assert work.names == ["b", "a", "c"]


def plan(folder, num):
    options = AnalysisOptions(str(folder), "raw", None, None, [], {"num": num})
    return plan_analysis("test", options)


def test_a_folder_is_of_one_plan(tmp_path):
    for _ in range(2):
        assert plan(tmp_path / "out", 3) == tmp_path / "out"
    saved = json.loads((tmp_path / "out/plan.json").read_text())
    assert saved == {"analysis": "test", "of": [], "num": 3}
    with pytest.raises(ValueError, match="whose num is 3, and this call's is 4; choose another"):
        plan(tmp_path / "out", 4)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="holds something else"):
            plan(folder, 3)
    (tmp_path / "out/plan.json").write_text("[1]")
    with pytest.raises(ValueError, match="is damaged"):
        plan(tmp_path / "out", 3)


def test_weights_have_a_fingerprint_whatever_their_layout_in_memory():
    torch.manual_seed(0)
    usual = torch.nn.Conv2d(1, 4, 3)
    other = copy.deepcopy(usual).to(memory_format=torch.channels_last)
    assert fingerprint(usual) == fingerprint(other)
    with torch.no_grad():
        other.weight[0, 0, 0, 0] += 1e-6
    assert fingerprint(usual) != fingerprint(other)


def test_a_figure_has_its_note_above_it(tmp_path):
    figure = Figure(figsize=(1, 1))
    save_figure(figure, tmp_path / "a.png")
    assert figure.get_suptitle() == ""
    save_figure(figure, tmp_path / "a.png", "a note")
    assert figure.get_suptitle() == "a note"
