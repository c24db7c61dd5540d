from urllib.error import HTTPError

import pytest
import torch
from support.spawn import spawn
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_diffusion.distributed import (
    all_gather_objects,
    call_on_rank_zero,
    rank_and_world_size,
    total_norm,
)


@pytest.mark.parametrize("fixture", ["folder", "one_rank"])
def test_a_process_without_others_or_in_a_group_of_its_own_is_the_first_of_one(request, fixture):
    request.getfixturevalue(fixture)
    assert rank_and_world_size() == (0, 1)
    assert all_gather_objects("mine") == ["mine"]
    assert call_on_rank_zero(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        call_on_rank_zero(lambda: 1 / 0)


@pytest.mark.usefixtures("one_rank")
def test_the_norm_of_all_is_that_of_whole_split_and_sparse_tensors_in_float32():
    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    split = fully_shard(nn.Linear(3, 2), mesh=mesh)
    half = torch.randn(5).bfloat16()
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [3.0, 1.0, -2.0], (4,))  # 4, 0, -2, 0
    parts = [split.weight.full_tensor(), half.float(), sparse.to_dense()]
    expected = torch.cat([part.flatten() for part in parts]).norm()
    norm = total_norm([split.weight.detach(), half, sparse])
    assert type(norm) is torch.Tensor
    torch.testing.assert_close(norm, expected.detach())


class Unreadable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")


def failures(folder):
    """What `call_on_rank_zero` raises on this rank for each of three exceptions."""
    torch.distributed.init_process_group("gloo")
    with (folder / "page").open("rb") as page:
        errors = [ValueError("no"), HTTPError("a.b", 404, "Gone", {}, page), Unreadable(code=3)]
        raised = []
        for error in errors:

            def fail(error=error):
                raise error

            try:
                call_on_rank_zero(fail)
            except Exception as failure:
                raised.append((type(failure).__name__, str(failure)))
    torch.distributed.destroy_process_group()
    return raised


@pytest.mark.system
def test_what_rank_zero_raises_is_raised_on_every_rank_even_if_it_cannot_be_sent(tmp_path):
    (tmp_path / "page").touch()
    zero, one = spawn(failures, 2, tmp_path, timeout=100)
    gone, unreadable = ("HTTPError", "HTTP Error 404: Gone"), ("Unreadable", "code 3")
    assert zero == [("ValueError", "no"), gone, unreadable]
    assert one == [zero[0], *(("RuntimeError", ": ".join(error)) for error in zero[1:])]
