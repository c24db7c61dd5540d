"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import lit_diffusion
import lit_diffusion.callbacks

MODULES = sorted(
    module.name
    for package in (lit_diffusion, lit_diffusion.callbacks)  # which lies in another folder
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(bool(test.examples) for test in tests) > 25
    assert "lit_diffusion.callbacks.ema" in MODULES
