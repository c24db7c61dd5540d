"""What README.md says is so."""

import re
from pathlib import Path

import pytest
import torch

from lit_diffusion.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(QUICK_START,) = [block for block in BLOCKS if "DiffusionModule(" in block]
GUIDE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/methods.md").read_text(), re.DOTALL)
METHODS = [block for block in BLOCKS if "momentum_decay(" in block or "MomentumDecay()" in block]


def test_the_first_screen_has_exactly_the_two_commands_of_the_set_up():
    first_screen = "\n".join(README.splitlines()[:40])
    commands = re.findall(r"```bash\n(.*?)```", first_screen, re.DOTALL)[:2]
    assert [c.strip() for c in commands] == [
        "pip install -e . -c constraints.txt && lit-diffusion fit --config configs/digits.yaml",
        'pip install -e ".[test]" -c constraints.txt && pytest',
    ]
    assert commands[1].strip() in (ROOT / ".ci" / "run").read_text()


def test_the_foreign_project_shown_is_the_one_that_is_tested():
    assert (ROOT / "tests/integration/foreign_project.py").read_text() in BLOCKS


def run(code: str, monkeypatch, folder: Path) -> dict:
    monkeypatch.chdir(folder)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_quick_start_runs(monkeypatch, tmp_path):
    names = run(QUICK_START.replace("max_steps=2000", "max_steps=2"), monkeypatch, tmp_path)
    assert names["images"].shape == (64, 1, 8, 8)


@pytest.mark.parametrize("code", METHODS + GUIDE)
def test_the_methods_are_used_as_shown(code, monkeypatch, tmp_path):
    names = run(code.replace("max_steps=500_000", "max_steps=5"), monkeypatch, tmp_path)
    if "density" in names:
        assert names["density"].sum() == pytest.approx(1)
    if "trainer" in names:
        assert names["trainer"].callbacks


@pytest.mark.slow
def test_the_quick_start_gives_digits(monkeypatch, tmp_path):
    images = run(QUICK_START, monkeypatch, tmp_path)["images"]
    digits, labels = [], []
    for batch in run(QUICK_START.split("module =")[0], monkeypatch, tmp_path)["Digits"]().in_order(
        "train"
    ):
        digits.append(batch[0])
        labels.append(batch[1])
    distance = torch.cdist(images.flatten(1).float(), torch.cat(digits).flatten(1).float())
    recognised = torch.cat(labels)[distance.argmin(1)] == torch.arange(64) % 10
    assert recognised.double().mean() > 0.8


def test_files_and_commands_that_are_named_exist():
    for path in re.findall(r"\]\(((?:docs|configs|tests)/[^)#]+)\)", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"configs/\w+\.yaml", README):
        assert (ROOT / path).exists(), path
    commands = set(re.findall(r"lit-diffusion (fit|[a-z-]+) -", README))
    assert commands - {"COMMAND"} <= set(COMMANDS)
