import pytest
import torch
from safetensors import safe_open
from support.plain_module import assert_same_bits

from lit_diffusion.checkpoints.averages import (
    delete_snapshots_after,
    reconstruct_average,
    write_snapshot,
)
from lit_diffusion.ema_profiles import exponent


def walk(num):
    """A random walk of weights."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 50, generator=generator, dtype=torch.float64).cumsum(0) / num**0.5


def average(weights, width, step):
    """Of the weights after steps 1, ..., `step`, by the integral of the profile over each step."""
    edges = torch.arange(step + 1, dtype=torch.float64) / step
    return (edges ** (exponent(width) + 1)).diff() @ weights[:step]


def of_walk(weights, step):
    return {w: {"a": average(weights, w, step).float()} for w in (0.05, 0.1)}


def write_walk(folder, weights, steps):
    """The SHA-256 by step."""
    return {step: write_snapshot(folder, step, of_walk(weights, step)) for step in steps}


@pytest.mark.parametrize("width", [0.02, 0.05, 0.075, 0.15, 0.25])
def test_widths_of_a_random_walk_are_the_direct_averages(tmp_path, width):
    weights = walk(3000)
    hashes = write_walk(tmp_path, weights, range(80, 3001, 80))
    for step in (2960, 2950):  # of a snapshot, and between
        result = reconstruct_average(tmp_path, width, step, of_walk(weights, step), hashes)["a"]
        expected = average(weights, width, step)
        other = (average(weights, 1.1 * width, step) - expected).norm()
        error = (result - expected).norm() / other
        assert error < (1e-5 if width in (0.05, 0.1) else 0.05 if 0.02 < width < 0.2 else 0.15)


def test_what_the_snapshots_cannot_tell_is_refused(tmp_path):
    weights = walk(800)
    last = of_walk(weights, 800)
    hashes = write_walk(tmp_path, weights, range(25, 801, 25))
    for width in (0.02, 0.2):
        reconstruct_average(tmp_path, width, 800, last, hashes)
    with pytest.raises(ValueError, match=r"width 0\.01 .* 31 snapshots .* is 17%, above 10%"):
        reconstruct_average(tmp_path, 0.01, 800, last, hashes)
    assert delete_snapshots_after(tmp_path, 0) == 32
    for width in (0.05, 0.07, 0.1):
        reconstruct_average(tmp_path, width, 800, last, hashes)
    with pytest.raises(
        ValueError, match=r"from 0 snapshots .* to a width of the run \(0\.05, 0\.1\)"
    ):
        reconstruct_average(tmp_path, 0.2, 800, last, hashes)


def test_snapshots_of_other_weights_are_not_mixed(tmp_path):
    hashes = {10: write_snapshot(tmp_path, 10, {0.05: {"a": torch.ones(2)}})}
    for last in ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"10\.safetensors holds averages of width 0\.05 for "):
            reconstruct_average(tmp_path, 0.05, 20, {0.05: last}, hashes)
        delete_snapshots_after(tmp_path, 10)
    unlike = {0.05: {"a": torch.ones(2)}, 0.1: {"b": torch.ones(2)}}  # by two callbacks
    with pytest.raises(
        ValueError, match=r"the checkpoint holds averages of width 0\.1 for weights"
    ):
        reconstruct_average(tmp_path / "none", 0.05, 20, unlike, {})
    result = reconstruct_average(tmp_path / "none", 0.05, 20, {0.05: {"a": torch.ones(2)}}, {})
    assert result["a"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_no_digit_or_part_of_a_number_is_lost(tmp_path, dtype):
    value = torch.full((2,), 1 / 3, dtype=dtype) * (1 + 2j if dtype.is_complex else 1)
    hashes = {10: write_snapshot(tmp_path, 10, {0.05: {"a": value}})}
    with safe_open(tmp_path / "step-000000010.safetensors", "pt") as file:
        assert_same_bits(file.get_tensor("0.05/a"), value)
    last = {0.05: {"a": value}, 0.06: {"a": value}}
    result = reconstruct_average(tmp_path, 0.055, 20, last, hashes)["a"]
    torch.testing.assert_close(result, value)


def test_a_snapshot_that_is_damaged_or_of_another_run_is_refused_by_name(tmp_path):
    last = {0.05: {"a": torch.ones(2)}}
    hashes = {10: write_snapshot(tmp_path, 10, last)}
    rule = r"step-000000010\.safetensors is not the snapshot .* at step 10: .* Delete it, or rest"
    for others in ({}, {20: hashes[10]}):
        with pytest.raises(ValueError, match=rule):
            reconstruct_average(tmp_path, 0.05, 20, last, others)
    reconstruct_average(tmp_path, 0.05, 20, last, hashes)
    reconstruct_average(tmp_path, 0.05, 10, last, {})  # needs none from before
    write_snapshot(tmp_path, 10, {0.05: {"a": torch.zeros(2)}})
    with pytest.raises(ValueError, match=rule):
        reconstruct_average(tmp_path, 0.05, 20, last, hashes)
