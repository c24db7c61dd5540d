import pytest
import torch

from lit_diffusion.ranks import from_all, from_first, largest, place


def check_alone():
    assert place() == (0, 1)
    assert from_all("mine") == ["mine"]
    assert from_first(lambda: 3) == 3
    assert largest(torch.tensor([1, 2])).tolist() == [1, 2]
    with pytest.raises(ZeroDivisionError):
        from_first(lambda: 1 / 0)


def test_a_process_without_others_is_the_first_of_one():
    check_alone()


def test_so_is_one_in_a_group_of_its_own(one_rank):
    check_alone()
