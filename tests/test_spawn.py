"""The tests' own way to run ranks tells failures apart and leaves no process behind."""

import os
import signal
import sys
import time

import pytest
import torch
from support.spawn import rank_and_size, run_ranks, spawn
from torch import distributed
from torch.utils.data import DataLoader, Dataset


def summed_ranks():
    distributed.init_process_group("gloo")
    total = torch.tensor(rank_and_size()[0] + 1)
    distributed.all_reduce(total)
    return total.item()


def ends():
    rank, _ = rank_and_size()
    if rank == 0:
        print("rank 0 is here")
        sys.exit(75)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("rank 2 fails")


class Endless(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(600)


def hangs():
    next(iter(DataLoader(Endless(), num_workers=1)))


@pytest.mark.slow
def test_ranks_see_each_other_and_return_values():
    assert spawn(summed_ranks, 3) == [6, 6, 6]


@pytest.mark.slow
def test_each_end_is_reported():
    ended = run_ranks(ends, 3)
    assert [rank.exit_code for rank in ended] == [75, -9, 1]
    assert "rank 0 is here" in ended[0].output
    assert "ValueError: rank 2 fails" in ended[2].output


@pytest.mark.slow
def test_ranks_that_hang_are_killed_with_their_workers():
    (ended,) = run_ranks(hangs, 1, timeout=10)
    assert ended.exit_code is None
    assert ended.outlived  # its worker, which was killed too
