from dataclasses import dataclass

import numpy as np
import pytest

from lit_diffusion.lab.analysis.saved import Saved


@dataclass(frozen=True)
class Found(Saved):
    names: list[str]
    number: float | None
    values: np.ndarray


@pytest.mark.parametrize("number", [0.1, None])
def test_what_is_saved_is_read_again(tmp_path, number):
    found = Found(["a", "b"], number, np.array([[1.0, np.nan], [2.0, 3.0]]))
    found.save(tmp_path / "found")
    again = Found.read(tmp_path / "found")
    assert (again.names, again.number) == (found.names, number)
    np.testing.assert_array_equal(again.values, found.values)
    assert again.values.dtype == np.float64


def test_half_a_result_is_not_read(tmp_path):
    Found(["a"], 1.0, np.ones(2)).save(tmp_path / "found")
    (tmp_path / "found.npz").unlink()
    with pytest.raises(FileNotFoundError):
        Found.read(tmp_path / "found")
