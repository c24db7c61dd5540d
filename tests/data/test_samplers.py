import pytest
import torch
from torch.utils.data import TensorDataset

from lit_diffusion.data.samplers import ShuffledSampler, even_batch_size


def of(num_images):
    return TensorDataset(torch.arange(num_images))


def shuffled(num_images, num_replicas=1, rank=0, seed=0, epoch=0):
    sampler = ShuffledSampler(of(num_images), seed, num_replicas, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_every_process_gets_the_same_number_of_batches():
    for num_images in range(3, 80):
        for num_replicas in (1, 2, 3):
            for asked in (1, 2, 5, 16):
                size = even_batch_size(num_images, num_replicas, asked)
                shares = [len(range(r, num_images, num_replicas)) for r in range(num_replicas)]
                assert len({-(-share // size) for share in shares}) == 1
                assert asked <= size <= max(asked, *shares)


def test_one_process_keeps_its_batch_size():
    assert all(even_batch_size(n, 1, 7) == 7 for n in range(1, 50))


def test_more_processes_than_images_is_refused():
    with pytest.raises(ValueError, match="got 2 images for 3 processes"):
        even_batch_size(2, 3, 1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_training_ranks_share_an_epoch_without_overlap(num_replicas):
    shares = [shuffled(20, num_replicas, rank, epoch=4) for rank in range(num_replicas)]
    assert {len(share) for share in shares} == {20 // num_replicas}
    keys = [key for share in shares for key in share]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(range(4 * 20, 5 * 20))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_global_batch_is_the_same_on_any_number_of_processes(num_replicas):
    alone = shuffled(60, epoch=1)
    shares = [shuffled(60, num_replicas, rank, epoch=1) for rank in range(num_replicas)]
    for step in range(5):
        batch = [key for share in shares for key in share[4 * step : 4 * (step + 1)]]
        size = 4 * num_replicas
        assert set(batch) == set(alone[size * step : size * (step + 1)])


def test_training_order_is_a_function_of_seed_and_epoch():
    assert shuffled(50, seed=1, epoch=2) == shuffled(50, seed=1, epoch=2)
    orders = {
        tuple(key % 50 for key in shuffled(50, seed=s, epoch=e)) for s in (0, 1) for e in (0, 1)
    }
    assert len(orders) == 4


def test_every_image_comes_first_equally_often():
    first = torch.tensor([shuffled(8, epoch=epoch)[0] % 8 for epoch in range(800)])
    chi_square = ((first.bincount(minlength=8) - 100) ** 2 / 100).sum()
    assert chi_square < 24.3  # 99.9% of chi-square with 7 degrees of freedom
