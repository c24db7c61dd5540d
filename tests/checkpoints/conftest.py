import pytest
import torch
from support.tiny_checkpoint import checkpoint_of, tiny
from torch.distributed.fsdp import fully_shard

from lit_diffusion.checkpoints.saving import write_checkpoint


@pytest.fixture
def file(tmp_path):
    write_checkpoint(checkpoint_of(tiny()), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.fixture
def split(one_rank):
    """A module whose weights are split over one rank, which is all of each."""
    return fully_shard(tiny(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
