"""Weights that fully_shard splits over ranks, beside the same weights on one process."""

import pytest
import torch
from support.on_ranks import run_on_ranks
from support.plain_module import assert_same_bits, by_profile
from support.power_ema_on_ranks import fit as power_fit
from support.sharded import Split, fit

from lit_diffusion.checkpoints.loading import load


def saved(folder):
    return torch.load(folder / "end.ckpt", weights_only=True)


def on_ranks(folder, epochs, *arguments, kind="file", ranks=2):
    """The folder of a fit whose weights are split; each rank had the same losses."""
    folder.mkdir()
    losses = run_on_ranks("sharded_on_ranks.py", folder, epochs, kind, *arguments, ranks=ranks)
    assert losses == [losses[0]] * ranks
    return folder


def on_one(folder, epochs, ckpt_path=None):
    """The folder of the same fit on one process, with whole weights."""
    folder.mkdir()
    fit(folder, ckpt_path, epochs)
    return folder


def assert_same_end(folder, other):
    """To the last bit, which two ranks allow: the mean of two equal gradients is exact."""
    for key in ("state_dict", "callbacks", "optimizer_states", "global_step"):
        assert_same_bits(saved(folder)[key], saved(other)[key])


def assert_similar_end(folder, other):
    """Up to float32's rounding of the mean of three gradients."""
    for key in ("state_dict", "callbacks"):
        torch.testing.assert_close(saved(folder)[key], saved(other)[key], rtol=1e-4, atol=1e-6)


@pytest.mark.system
def test_without_a_trainer_two_ranks_average_save_and_load_as_one_does(tmp_path):
    assert run_on_ranks("shards_on_ranks.py", tmp_path) == ["done"] * 2


@pytest.mark.slow
def test_without_a_trainer_three_ranks_average_save_and_load_as_one_does(tmp_path):
    assert run_on_ranks("shards_on_ranks.py", tmp_path, ranks=3) == ["done"] * 3


@pytest.mark.slow
def test_a_fit_with_split_weights_ends_as_the_one_with_whole_weights(tmp_path):
    split, whole = on_ranks(tmp_path / "2", "2"), on_one(tmp_path / "1", 2)
    assert_same_end(split, whole)
    for weights in ("raw", "ema", "ema_0.5"):
        found, expected = (
            load(folder / "end.ckpt", weights, module=Split()) for folder in (split, whole)
        )
        assert_same_bits(found.state_dict(), expected.state_dict())


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    undisturbed = on_one(tmp_path / "undisturbed", 2)
    one, two = on_one(tmp_path / "1", 1), on_ranks(tmp_path / "2", "1")
    parts = on_ranks(tmp_path / "parts", "1", kind="parts")
    on_two = on_ranks(tmp_path / "1 to 2", "2", one / "end.ckpt")
    assert_same_end(on_two, undisturbed)
    assert_same_end(on_one(tmp_path / "2 to 1", 2, two / "end.ckpt"), undisturbed)
    for start in (two, parts):
        folder = tmp_path / f"{start.name} to 3"
        on_three = on_ranks(folder, "2", start / "end.ckpt", ranks=3)
        assert_similar_end(on_three, undisturbed)


@pytest.mark.slow
def test_weights_that_are_split_twice_are_averaged_saved_and_loaded_too(tmp_path):
    assert run_on_ranks("shards_on_a_grid.py", tmp_path, ranks=4) == ["done"] * 4


def power_on_ranks(folder, epochs, *arguments):
    folder.mkdir(exist_ok=True)
    steps = run_on_ranks("power_ema_on_ranks.py", folder, str(epochs), *arguments)
    assert steps == [4 * epochs] * 2
    return folder


@pytest.mark.slow
def test_averages_of_any_width_are_those_of_whole_weights(tmp_path):
    split, whole = power_on_ranks(tmp_path / "2", 8), tmp_path / "1"
    trainer = power_fit(whole, 8)
    power_on_ranks(tmp_path / "parts", 4)
    parts = power_on_ranks(tmp_path / "parts", 8, tmp_path / "parts" / "checkpoints" / "last.ckpt")
    files = sorted((whole / "ema-snapshots").iterdir())
    assert len(files) == 8
    for folder in (split, parts):
        others = sorted((folder / "ema-snapshots").iterdir())
        assert [f.name for f in files] == [f.name for f in others]
        assert [f.read_bytes() for f in files] == [f.read_bytes() for f in others]
        for width in (0.05, 0.07, 0.15):
            found, expected = (
                load(run, f"power_{width}", module=Split()).state_dict() for run in (folder, whole)
            )
            assert_same_bits(found, expected)
    direct = by_profile(trainer.lightning_module.path, 0.15)
    for name, value in direct.items():
        torch.testing.assert_close(found[name].double(), value, rtol=0, atol=2e-3)
