import pytest
import torch
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
