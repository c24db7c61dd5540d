"""Commands without the extra [lab]; the library and the digits do not need it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import call
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


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("compare runs", "markdown_it"),
        (f"sweep tiny.yaml --arms slow.yaml --seeds 0 {TRUST}", "matplotlib"),
        ("analyze consistency a.ckpt b.ckpt --out out", "matplotlib"),
    ],
)
def test_a_command_that_needs_the_extra_names_it_before_any_work(
    command, package, monkeypatch, capsys
):
    write_configs()
    for name in ("a.ckpt", "b.ckpt"):
        Path(name).touch()
    before = sorted(Path().iterdir())
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails as if it were absent
    assert call(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    fix = "run pip install 'lit-diffusion[lab]', or pip install -e '.[lab]' in a checkout."
    assert line.endswith(f"{package} is not installed; {fix}")
    assert sorted(Path().iterdir()) == before
    assert call(f"{command.split()[0]} --help") == 0


@pytest.mark.slow
def test_training_and_scoring_digits_need_no_extra():
    config = small_digits(2)
    fid = {"num_samples": 20, "extractor": "digits-cnn", "every_n_steps": 2}
    callback = {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": fid}
    config["trainer"]["callbacks"].append(callback)
    Path("digits.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", WITHOUT_LAB, "fit", "--config", "digits.yaml"]
    end = subprocess.run(command, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
