"""Files of callbacks/ that docs/callbacks.md calls portable, in a package of somebody else's."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/support/portable_run.py"
FILES = ("curriculum", "ema", "finite_updates", "loss_resampler", "momentum_decay", "step_seed")
OLD = ("torch==2.4.*", "lightning==2.4.*", "pytorch-lightning==2.4.*", "numpy<2")


def train_with_copies(folder: Path, package: str, python: Path | str = sys.executable) -> None:
    """With the files beside it that the page names, without lit_diffusion and the other package."""
    for name in FILES:
        project = folder / f"project_{name}"
        project.mkdir(parents=True)
        (project / "__init__.py").touch()
        others = ("curriculum",) if name == "loss_resampler" else ()
        for file in (name, "trainer_state", *others):
            shutil.copy(ROOT / "callbacks" / f"{file}.py", project)
    done = subprocess.run(
        [python, SCRIPT, folder, package],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_copied_file_trains_another_projects_module_and_resumes_bit_exactly(tmp_path, package):
    train_with_copies(tmp_path, package)


@pytest.mark.rare  # installs torch: minutes, and gigabytes
def test_copied_files_train_on_torch_2_4_with_lightning_2_4(tmp_path):
    """In an environment with these: $TORCH_2_4_PYTHON, or built by pip."""
    python = os.environ.get("TORCH_2_4_PYTHON")
    if not python:
        venv.create(tmp_path / "env", with_pip=True)
        python = tmp_path / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *OLD], check=True)
    code = "import torch, lightning; print(torch.__version__, lightning.__version__)"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert [v[:4] for v in versions.stdout.split()] == ["2.4.", "2.4."]
    for package in ("lightning", "pytorch_lightning"):
        train_with_copies(tmp_path / package, package, python)
