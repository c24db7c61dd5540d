import pytest
import torch

from lit_diffusion.callbacks.parts.finite import first_nonfinite, nonfinite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found_in_any_shape_and_type(value):
    wide = torch.tensor([1e300, 1.0], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor([[0, 0]], torch.tensor([1.0, value]), (3,))
    tensors = [wide, torch.full((2, 3), value), torch.tensor(value, dtype=torch.bfloat16)]
    assert nonfinite([*tensors, torch.ones(0), sparse]).tolist() == [False, True, True, False, True]


def test_large_numbers_whose_squares_overflow_are_finite():
    large = torch.full((3,), 3e38)
    assert nonfinite([large, torch.full((3,), 6e4, dtype=torch.float16)]).tolist() == [False] * 2
    assert nonfinite([large, torch.tensor(torch.nan)]).tolist() == [False, True]


def test_the_first_is_found_past_empty_ones():
    good, odd = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert first_nonfinite([good, torch.empty(0), odd, odd]) == 2
    assert first_nonfinite([good, torch.empty(0)]) is None
    assert first_nonfinite([]) is None
