import pytest


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Stand in an empty folder, without weights in the cache, and in no job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("torch.hub._hub_dir", None, raising=False)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
