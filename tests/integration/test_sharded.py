"""Fits with weights that fully_shard splits over ranks, beside the same fit on one process."""

import pytest
import torch
from support.on_ranks import run_on_ranks
from support.plain_module import assert_same_bits
from support.sharded import fit

SCRIPT = "sharded_on_ranks.py"


def saved(path):
    return torch.load(path, weights_only=True)


def one_process(folder, epochs, ckpt_path=None):
    folder.mkdir()
    trainer, _ = fit(folder, ckpt_path, epochs)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer.lightning_module.losses


@pytest.mark.system
def test_a_split_fit_ends_as_the_same_fit_with_whole_weights(tmp_path):
    """To the last bit on two ranks: the mean of two equal gradients is exact."""
    for found in run_on_ranks(SCRIPT, tmp_path, "2"):
        assert found["losses"] == one_process(tmp_path / f"{found['rank']}", 2)
    split, whole = saved(tmp_path / "end.ckpt"), saved(tmp_path / "0" / "end.ckpt")
    for key in ("state_dict", "callbacks"):
        assert_same_bits(split[key], whole[key])


@pytest.mark.system
def test_without_a_trainer_two_ranks_average_save_and_load_as_one_does(tmp_path):
    assert run_on_ranks("shards_on_ranks.py", tmp_path) == ["done"] * 2


@pytest.mark.slow
def test_without_a_trainer_three_ranks_average_save_and_load_as_one_does(tmp_path):
    assert run_on_ranks("shards_on_ranks.py", tmp_path, ranks=3) == ["done"] * 3
