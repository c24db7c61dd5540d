"""A disk that fills up under a run: what was saved before stays."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.commands import call
from support.small_digits import small_digits

from lit_diffusion.checkpoints.reading import read_checkpoint

BYTES = 6 * 2**20
LAST = Path("checkpoints", "last.ckpt")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Take all of the disk but so many bytes."""
    free = os.statvfs(folder)
    file = folder / "something-else"
    file.write_bytes(bytes(free.f_bavail * free.f_frsize - leave))
    return file


@pytest.mark.system
def test_a_run_on_a_full_disk_ends_with_a_message_and_its_last_checkpoint(
    small_disk, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(small_digits(4)))
    run = small_disk / "run"
    command = f"fit --config small.yaml --trainer.default_root_dir={run}"
    assert call(command) == 0
    before = hashlib.sha256((run / LAST).read_bytes()).hexdigest()
    rest = fill(small_disk, leave=(run / LAST).stat().st_size // 2)
    capsys.readouterr()

    assert call(f"{command} --ckpt_path=last --trainer.max_steps=8") == 1
    error = capsys.readouterr().err
    assert "last.ckpt could not be written" in error
    assert "the checkpoint saved there before is intact" in error
    assert "Traceback" not in error
    assert hashlib.sha256((run / LAST).read_bytes()).hexdigest() == before
    assert read_checkpoint(run / LAST)["global_step"] == 4
    assert os.listdir(run / "checkpoints") == ["last.ckpt"]

    rest.unlink()
    assert call(f"{command} --ckpt_path=last --trainer.max_steps=8") == 0
    assert read_checkpoint(run / LAST)["global_step"] == 8
