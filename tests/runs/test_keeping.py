import os

import pytest
from support.saving import fit

from lit_diffusion.runs.keeping import ImagesSeen, RunConfig


def test_a_config_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """What is half a config would be taken for another run's, or for none."""

    class Parser:
        def dump(self, config, **options):
            return "trainer:"

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fit(RunConfig(Parser(), None), tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("images", [[1], "abc", [1, 2, "many"], [1, 2, True]])
def test_counts_of_images_that_are_none_are_refused(images):
    with pytest.raises(ValueError, match="images_seen must be three counts"):
        ImagesSeen().on_load_checkpoint(None, None, {"images_seen": images})
