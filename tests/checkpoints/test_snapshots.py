import pytest
import torch

from lit_diffusion.checkpoints.snapshots import reconstructed, write_snapshot


def test_a_tracked_width_is_read_back_and_an_earlier_step_too(tmp_path):
    for step in (10, 20):
        averages = {w: {"a.b": torch.full((2,), w * step)} for w in (0.05, 0.1)}
        write_snapshot(tmp_path, step, averages)
    found = reconstructed(tmp_path, 0.1, 20)
    assert found["a.b"].dtype == torch.float32
    torch.testing.assert_close(found["a.b"], torch.full((2,), 2.0), rtol=1e-4, atol=1e-4)
    earlier = reconstructed(tmp_path, 0.05, 10)
    torch.testing.assert_close(earlier["a.b"], torch.full((2,), 0.5), rtol=1e-4, atol=1e-4)


def test_a_damaged_snapshot_is_named(tmp_path):
    write_snapshot(tmp_path, 10, {0.05: {"a": torch.ones(2)}})
    file = tmp_path / "step-000000010.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"step-000000010.safetensors is no snapshot .* delete it"):
        reconstructed(tmp_path, 0.05, 10)
