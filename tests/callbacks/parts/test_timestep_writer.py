from itertools import combinations

import pytest
import torch
from lightning.pytorch import Callback
from support.foreign_times import ForeignTimes
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import (
    CurriculumWeight,
    ImportanceWeightedCurriculum,
    LossSecondMomentResampler,
    ShiftingGaussian,
    TimestepCurriculum,
)

WRITERS = {
    "curriculum": (lambda: TimestepCurriculum(6, num_bins=20), (True, False)),
    "weight": (lambda: CurriculumWeight(6, num_bins=20), (False, True)),
    "importance": (lambda: ImportanceWeightedCurriculum(6, num_bins=20), (True, True)),
    "shifting": (lambda: ShiftingGaussian(6, num_bins=20), (True, False)),
    "resampler": (lambda: LossSecondMomentResampler(4, history=2), (True, True)),
}


@pytest.fixture(params=list(WRITERS))
def writer(request):
    return WRITERS[request.param][0]()


def both(module):
    return module.timestep_density, module.timestep_weight


class Outside(Callback):
    """What the module says between training batches."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.seen.append(both(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(both(pl_module))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("make", [ForeignTimes, tiny_diffusion])
def test_a_module_is_told_during_training_batches_and_at_no_other_time(tmp_path, make, name):
    (make_writer, writes), module, outside, told = WRITERS[name], make(), Outside(), []
    step = module.training_step

    def training_step(batch, batch_idx):
        told.append(tuple(value is not None for value in both(module)))
        return step(batch, batch_idx)

    module.training_step = training_step
    batches = loader() if make is ForeignTimes else images(16, 4)
    trainer = make_trainer(tmp_path, make_writer(), outside, max_epochs=2)
    trainer.fit(module, batches, batches)
    assert told == [writes] * 8
    assert len(outside.seen) == 12
    assert all(seen == (None, None) for seen in [*outside.seen, both(module)])


def test_a_second_fit_tells_it_again(tmp_path, writer):
    module = ForeignTimes()
    for _ in range(2):
        make_trainer(tmp_path, writer).fit(module, loader())
    first, second = module.told[:4], module.told[4:]
    assert [told[1:].count(None) for told in first] == [told[1:].count(None) for told in second]
    assert both(module) == (None, None)


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "on_validation_start"])
def test_an_interrupted_fit_leaves_nothing_on_the_module(tmp_path, writer, where):
    def fails(*_):
        raise ArithmeticError

    module = ForeignTimes()
    setattr(module, where, fails)
    trainer = make_trainer(tmp_path, writer, num_sanity_val_steps=0)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader(), loader())
    assert both(module) == (None, None)


def test_a_skipped_epoch_leaves_nothing_on_the_module(tmp_path, writer):
    module = ForeignTimes()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    make_trainer(tmp_path, writer, max_epochs=2).fit(module, loader())
    assert len(module.told) == 4
    assert both(module) == (None, None)


@pytest.mark.parametrize("name", WRITERS)
def test_a_module_needs_the_attributes_that_are_written_and_no_others(tmp_path, name):
    make_writer, (density, weight) = WRITERS[name]
    module = PlainModule()
    with pytest.raises(ValueError, match=r"protocols\.HasTimesteps.*PlainModule lacks"):
        make_trainer(tmp_path, make_writer()).fit(module, loader())
    assert module.losses == []
    if density != weight:
        setattr(module, "timestep_density" if density else "timestep_weight", None)
        make_trainer(tmp_path, make_writer()).fit(module, loader())
        assert len(module.losses) == 4


@pytest.mark.parametrize(("first", "second"), [*combinations(WRITERS, 2), ("shifting", "shifting")])
def test_two_writers_of_an_attribute_are_refused_at_fit_start_and_others_go_together(
    tmp_path, first, second
):
    (make_first, writes_first), (make_second, writes_second) = WRITERS[first], WRITERS[second]
    module = ForeignTimes()
    trainer = make_trainer(tmp_path, make_first(), make_second())
    if any(a and b for a, b in zip(writes_first, writes_second, strict=True)):
        with pytest.raises(ValueError, match=r"both set timestep_.*; remove one of them"):
            trainer.fit(module, loader())
        assert module.told == []
    else:
        trainer.fit(module, loader())
        assert all(None not in told for told in module.told)


def test_an_attribute_that_the_user_has_set_is_refused_and_left_as_it_is(tmp_path):
    module, own = ForeignTimes(), torch.ones(7)
    module.timestep_density = own
    with pytest.raises(ValueError, match=r"something else has set it to a tensor of shape \(7,\)"):
        make_trainer(tmp_path, TimestepCurriculum(6)).fit(module, loader())
    assert module.timestep_density is own
    make_trainer(tmp_path, CurriculumWeight(6)).fit(module, loader())
    assert [density for _, density, _ in module.told] == [own] * 4
    assert both(module) == (own, None)


def test_another_hand_on_the_attribute_is_found_in_the_first_batches(tmp_path):
    class Other(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            pl_module.timestep_density = torch.ones(3)

    for callbacks in ([Other(), TimestepCurriculum(6)], [TimestepCurriculum(6), Other()]):
        module = ForeignTimes()
        with pytest.raises(ValueError, match="TimestepCurriculum sets timestep_density, and some"):
            make_trainer(tmp_path, *callbacks).fit(module, loader())
        assert len(module.told) < 2
