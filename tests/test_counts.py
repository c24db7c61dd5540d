import pytest

from lit_diffusion.counts import is_count


@pytest.mark.parametrize("value", [0, 7, 2**63 - 1])
def test_counts(value):
    assert is_count(value)


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None, [1]])
def test_what_is_none(value):
    assert not is_count(value)
