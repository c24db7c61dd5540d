"""Finished runs, for the tests of more than one file."""

import shutil
from pathlib import Path

import pytest
from support.sweeping import sweep_into


@pytest.fixture(scope="session")
def swept(tmp_path_factory) -> Path:
    """The arms baseline and slow of a sweep; not to be changed."""
    return sweep_into(tmp_path_factory.mktemp("swept"))


@pytest.fixture
def one_run(swept) -> None:
    """A copy of them, as out in the current folder."""
    shutil.copytree(swept, "out")
