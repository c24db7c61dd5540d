"""Commands without the extra [lab]; the library and the digits do not need it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.small_digits import small_digits
from support.sweeping import TRUST, write_configs

pytestmark = pytest.mark.usefixtures("folder")

# Libraries that use matplotlib where it is installed come first.
WITHOUT_LAB = """
import sys
import lightning.pytorch, sklearn.datasets, torch_fidelity, torchmetrics

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("markdown_it", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.split(".")[0] in ("markdown_it", "matplotlib")]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
from lit_diffusion.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def call_without_lab(*arguments):
    command = [sys.executable, "-c", WITHOUT_LAB, *arguments]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}  # of the configs' `support`
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.quick
@pytest.mark.parametrize(
    "command",
    [
        "compare runs",
        f"sweep tiny.yaml --arms slow.yaml --seeds 0 {TRUST}",
        "analyze consistency runs/a runs/b --out out",
    ],
)
def test_a_command_that_needs_the_extra_names_it_before_any_work(command):
    write_configs()
    before = sorted(Path().iterdir())
    end = call_without_lab(*command.split())
    assert end.returncode == 2
    (line,) = end.stderr.splitlines()
    assert line.endswith("is not installed; in lit-diffusion's folder: pip install -e '.[lab]'")
    assert sorted(Path().iterdir()) == before


@pytest.mark.slow
def test_help_needs_no_extra():
    assert call_without_lab("compare", "--help").returncode == 0


@pytest.mark.slow
def test_training_and_scoring_digits_need_no_extra():
    config = small_digits(2)
    fid = {"num_samples": 20, "extractor": "digits-cnn", "every_n_steps": 2}
    callback = {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": fid}
    config["trainer"]["callbacks"].append(callback)
    Path("digits.yaml").write_text(yaml.safe_dump(config))
    end = call_without_lab("fit", "--config", "digits.yaml")
    assert end.returncode == 0, end.stderr
