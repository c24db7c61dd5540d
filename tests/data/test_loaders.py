import pytest
import torch
from support.plain_module import make_trainer
from support.tiny_diffusion import tiny_diffusion
from torch.utils.data import TensorDataset

from lit_diffusion.data.digits import Digits
from lit_diffusion.data.loaders import ResumableLoader, batches_of_epoch
from lit_diffusion.data.samplers import ShuffledSampler

DATA = TensorDataset(torch.arange(10))


def loader(done, **options):
    return ResumableLoader(
        DATA, lambda: done[0], sampler=ShuffledSampler(DATA, 3), batch_size=2, **options
    )


def values(batches):
    return [x.tolist() for (x,) in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_after_the_batches_that_were_done(workers):
    done = [0]
    numbers = loader(done, num_workers=workers, persistent_workers=workers > 0)
    whole = values(numbers)
    assert sorted(value for batch in whole for value in batch) == list(range(10))
    for count in (1, 4, 5):
        done[0] = count
        assert values(numbers) == whole[count:]
    done[0] = 0
    assert values(numbers) == whole
    assert len(numbers) == 5


def test_nothing_is_asked_before_the_first_batch_is_wanted():
    asked = []
    numbers = ResumableLoader(
        DATA, lambda: asked.append(1) or 0, sampler=ShuffledSampler(DATA, 3), batch_size=2
    )
    batches = iter(numbers)
    assert not asked
    next(batches)
    assert asked == [1]


def test_an_order_that_is_not_ours_is_left_alone():
    assert values(ResumableLoader(DATA, lambda: 1, batch_size=5)) == [[*range(5)], [*range(5, 10)]]


def test_a_trainer_tells_how_far_its_epoch_is(tmp_path):
    seen = []

    class Told(Digits):
        def _batches_done(self):
            seen.append(batches_of_epoch(self.trainer))
            return seen[-1]

    module = tiny_diffusion(num_classes=None, label_dropout=0.0)
    data = Told(batch_size=500)
    make_trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(module, data)
    assert seen == [0, 0]
