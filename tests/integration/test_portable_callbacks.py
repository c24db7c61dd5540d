"""Files of callbacks/ that docs/callbacks.md calls portable, in a package of somebody else's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/support/portable_run.py"
FILES = ("curriculum", "ema", "finite_updates", "loss_resampler", "momentum_decay", "step_seed")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_copied_file_trains_another_projects_module_and_resumes_bit_exactly(tmp_path, package):
    """With trainer_state.py beside it alone, and neither lit_diffusion nor the other Lightning."""
    for name in FILES:
        project = tmp_path / f"project_{name}"
        project.mkdir()
        (project / "__init__.py").touch()
        for file in (name, "trainer_state"):
            shutil.copy(ROOT / "callbacks" / f"{file}.py", project)
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, package],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]
