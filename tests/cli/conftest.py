from copy import deepcopy

import pytest

from lit_diffusion.checkpoints import loading

MODULES = {}
"""By their class paths and arguments."""


@pytest.fixture(autouse=True)
def _modules_are_built_once(monkeypatch):
    """Later checkpoints of the same class paths and arguments get a copy, 0.1 s sooner."""
    build = loading.build_module

    def build_or_copy(checkpoint, path, trust=()):
        key = repr((loading.model_spec(checkpoint), list(trust)))
        if "'folder'" in key:  # whose files may have changed
            return build(checkpoint, path, trust)
        if key not in MODULES:
            MODULES[key] = build(checkpoint, path, trust)
        return deepcopy(MODULES[key])

    monkeypatch.setattr(loading, "build_module", build_or_copy)
