"""Metadata that several files repeat, and what the wheel contains."""

import configparser
import re
from pathlib import Path

import yaml
from support.oldest_versions import oldest_versions

from lit_diffusion import __version__

ROOT = Path(__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_the_version_is_the_same_everywhere():
    changes = (ROOT / "CHANGELOG.md").read_text()
    if ".dev" in __version__:  # between releases
        assert "## [Unreleased]" in changes
        return
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f"## [{__version__}]" in changes


def test_python_versions_are_those_that_ci_runs():
    named = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["run"]["steps"]
    tested = [step["with"]["python-version"] for step in steps if "python-version" in str(step)]
    assert named == tested == [SETUP["options"]["python_requires"].lstrip(">=")]


def test_every_dependency_has_an_oldest_version():
    core = SETUP["options"]["install_requires"].split()
    oldest = oldest_versions(SETUP, [])
    assert len(oldest) == len(core)
    assert all(any(line.startswith(name) for line in core) for name in oldest)
    assert {"matplotlib", "pytest"} <= oldest_versions(SETUP, ["test"]).keys()


def test_all_configs_are_installed():
    folder = ROOT / "configs"
    patterns = SETUP["options.package_data"]["lit_diffusion.configs"].split(", ")
    installed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {path for path in folder.rglob("*") if path.is_file()} == installed


def test_templates_of_issues_ask_for_the_doctor():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    labels = [part["attributes"]["label"] for part in form["body"]]
    assert any("lit-diffusion doctor" in label for label in labels)
