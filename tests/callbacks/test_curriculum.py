import math
from functools import partial

import pytest
import torch
from support.foreign_times import ForeignTimes
from support.golden import close, load, tensor
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion

from lit_diffusion import callbacks
from lit_diffusion.callbacks import (
    CurriculumWeight,
    ImportanceWeightedCurriculum,
    TimestepCurriculum,
)
from lit_diffusion.callbacks.curriculum import clts_density, clts_gamma, total_variation
from lit_diffusion.lab.shifting_gaussian import ShiftingGaussian
from lit_diffusion.modules import diffusion

CASE = "case12_seed_formulas"
CURRICULA = [TimestepCurriculum, CurriculumWeight, ImportanceWeightedCurriculum]
CPU = torch.device("cpu")

# The pure functions


@pytest.mark.parametrize("num_bins", [1000, 50])
def test_densities_and_distances_from_uniform_equal_the_papers_formula(num_bins):
    for gamma in (0.0, 0.25, 0.5, 1.0):
        density = clts_density(int(100 * gamma), 100, num_bins=num_bins)
        expected = tensor(CASE, f"clts_T{num_bins}/P_gamma{gamma}")
        close(density, expected, rtol=1e-12, atol=1e-15)
    expected = tensor(CASE, f"clts_T{num_bins}/tv_to_uniform_gamma1")
    close(total_variation(density), expected, rtol=1e-12, atol=1e-15)


def test_gamma_equals_the_papers_formula_and_stays_at_one():
    gammas = [clts_gamma(step, 50_000) for step in load(CASE)["clts/iter"].tolist()]
    assert gammas == load(CASE)["clts/gamma_target50000"].tolist()
    assert clts_gamma(500_000, 50_000) == 1


@pytest.mark.parametrize("normalize", ["truncate", "mix"])
@pytest.mark.parametrize("std", [1 / 200, 1.0, 100.0])
@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
def test_densities_are_probabilities_whose_mode_is_the_mean(normalize, std, mean):
    for step in (0, 1, 250, 999, 1000, 10**7):
        density = clts_density(step, 1000, mean, std, 200, normalize)
        assert density.dtype == torch.float64
        assert (density >= 0).all()
        assert density.sum().item() == pytest.approx(1, abs=1e-12)
        assert step == 0 or abs((density.argmax().item() + 1) / 200 - mean) <= 1 / 200
    assert torch.equal(density, clts_density(1000, 1000, mean, std, 200, normalize))


def test_the_share_of_the_gaussian_is_gamma_if_truncated_and_less_if_mixed():
    gaussian = clts_density(4, 4) - 1 / 1000
    for step, mixed in ((1, 0.11), (2, 0.27), (3, 0.53), (4, 1.0)):
        close(clts_density(step, 4) - 1 / 1000, step / 4 * gaussian, rtol=1e-12, atol=1e-15)
        by_mixing = clts_density(step, 4, normalize="mix") - 1 / 1000
        share = (by_mixing @ gaussian / (gaussian @ gaussian)).item()
        close(by_mixing, share * gaussian, rtol=1e-9, atol=1e-15)
        assert share == pytest.approx(mixed, abs=0.005)


def test_the_shifting_gaussian_goes_from_the_noisiest_level_to_the_cleanest_and_stays():
    shifting = ShiftingGaussian(100, num_bins=50)
    modes = [shifting.density_at(step).argmax().item() for step in range(151)]
    assert modes[0] == 49
    assert modes[100:] == [0] * 51
    assert modes == sorted(modes, reverse=True)
    assert modes[50] in (24, 25)
    first = ShiftingGaussian(100).density_at(0)
    close(first.sum(), torch.tensor(1.0))
    ratio = math.exp(-((1 - 0.001) ** 2) / (2 * 0.25**2))
    assert (first[0] / first[-1]).item() == pytest.approx(ratio, rel=1e-9)


# On a module


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_density_is_that_of_the_optimizer_steps_completed(tmp_path, accumulate):
    module, curriculum = ForeignTimes(), TimestepCurriculum(5, 0.2, 0.3, 40, "mix")
    trainer = make_trainer(tmp_path, curriculum, max_epochs=4, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader())
    steps = [4 * e + b for e in range(4) for b in range(4)]
    if accumulate == 3:  # and one step for the last batch of an epoch
        steps = [2 * e + b // 3 for e in range(4) for b in range(4)]
    assert [step for step, _, _ in module.visible] == steps
    for step, density, weight in module.visible:
        assert torch.equal(density, clts_density(step, 5, 0.2, 0.3, 40, "mix"))
        assert weight is None


def test_gamma_and_the_distance_from_uniform_are_logged_as_often_as_lightning_logs(tmp_path):
    logger, shifting = MemoryLogger(), ShiftingGaussian(4)
    for callback in (TimestepCurriculum(4), shifting):
        options = {"logger": logger, "max_epochs": 2, "log_every_n_steps": 2}
        make_trainer(tmp_path, callback, **options).fit(ForeignTimes(), loader())
    gammas, steps = [0.25, 0.75, 1, 1], (1, 3, 5, 7)
    for name, values in {
        "clts/gamma": gammas,
        "clts/tv": [gamma * total_variation(clts_density(1, 1)).item() for gamma in gammas],
        "shifting/mean": [0.75, 0.25, 0, 0],
        "shifting/tv": [total_variation(shifting.density_at(step)).item() for step in steps],
    }.items():
        assert [value for _, value in logger.of(name)] == pytest.approx(values, rel=1e-4)


# What the controls are equal to, by enumeration of the bins

BINS = 12


@pytest.fixture
def module():
    torch.manual_seed(1)  # of some weights the gradient is nearly the same at all levels
    return tiny_diffusion(network=TinyNetwork().eval(), label_dropout=0.0).eval()


def expected_gradient(module, monkeypatch, timesteps):
    """Sum over bins of their probability times the gradient that training_step has there."""
    module.timestep_density, module.timestep_weight = timesteps
    density = torch.ones(BINS) if module.timestep_density is None else module.timestep_density
    module.trainer = make_trainer("unused")
    module.log = module.log_dict = lambda *_, **__: None
    gradient = 0.0
    for i, batch in enumerate(images(BINS, 1)):
        u = torch.tensor([(i + 0.5) / BINS], dtype=torch.float64)
        monkeypatch.setattr(diffusion, "draw_uniforms", lambda *_, u=u, **__: u)
        torch.manual_seed(i)  # of the noise
        loss = module.training_step(batch, 0)["loss"]
        parts = torch.autograd.grad(loss, list(module.parameters()))
        gradient += density[i] / density.sum() * torch.cat([g.flatten() for g in parts]).double()
    return gradient


@pytest.mark.parametrize(("step", "normalize"), [(40, "mix"), (100, "truncate")])
def test_the_curriculum_equals_its_weight_in_expectation_and_undone_the_baseline(
    module, monkeypatch, step, normalize
):
    arguments = {"num_steps": 100, "std": 0.3, "num_bins": BINS, "normalize": normalize}
    curriculum, weighted, undone = (
        expected_gradient(module, monkeypatch, make(**arguments).timesteps_at(step, CPU))
        for make in CURRICULA
    )
    baseline = expected_gradient(module, monkeypatch, (None, None))
    close(weighted, curriculum, rtol=1e-5, atol=1e-8)
    close(undone, baseline, rtol=1e-5, atol=1e-8)
    assert (curriculum - baseline).norm() / baseline.norm() > 0.05


# What is refused

BAD = [
    ({"num_steps": 0}, "num_steps must be at least 1 optimizer step, got 0"),
    ({"num_steps": math.nan}, "got nan"),
    ({"mean": 300}, "a mean is a noise level u in .* got 300; divide"),
    ({"std": 0.0}, "std must be at least the width of a bin, 1 / 1000"),
    ({"std": math.inf}, "and finite, got inf"),
    ({"num_bins": 0}, "num_bins must be at least 1, got 0"),
    ({"normalize": "clamp"}, "must be 'truncate' or 'mix', got 'clamp'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_refused(arguments, message):
    for make in (*CURRICULA, partial(clts_density, step=3)):
        with pytest.raises(ValueError, match=message):
            make(**{"num_steps": 10, **arguments})


def test_bad_arguments_of_the_shifting_gaussian_are_refused():
    for wrong in ({"num_steps": 0}, {"start": 2}, {"end": -1}, {"std": 0}, {"num_bins": 0}):
        with pytest.raises(ValueError, match="got"):
            ShiftingGaussian(**{"num_steps": 10, **wrong})


def test_a_density_that_weights_cannot_undo_is_refused():
    with pytest.raises(ValueError, match=r"need a density above 0 everywhere.*use a larger std"):
        ImportanceWeightedCurriculum(9, std=0.01)


# Noise levels that are set on a module

WRITERS = {
    "curriculum": (lambda: callbacks.TimestepCurriculum(6, num_bins=20), (True, False)),
    "weight": (lambda: callbacks.CurriculumWeight(6, num_bins=20), (False, True)),
    "importance": (lambda: callbacks.ImportanceWeightedCurriculum(6, num_bins=20), (True, True)),
    "resampler": (lambda: callbacks.LossSecondMomentResampler(4, history=2), (True, True)),
}


def both(module):
    return module.timestep_density, module.timestep_weight


@pytest.mark.parametrize("name", WRITERS)
def test_the_attributes_are_set_during_training_batches_and_at_no_other_time(tmp_path, name):
    (make_writer, writes), module, outside = WRITERS[name], ForeignTimes(), []
    writer = make_writer()
    module.on_validation_batch_start = lambda *_: outside.append(both(module))
    module.on_train_epoch_end = lambda: outside.append(both(module))
    for _ in range(2):
        make_trainer(tmp_path, writer).fit(module, loader(), loader())
    assert [tuple(v is not None for v in visible[1:]) for visible in module.visible] == [writes] * 8
    assert len(outside) == 14
    assert all(values == (None, None) for values in [*outside, both(module)])


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end", "on_validation_start"])
def test_an_interrupted_fit_leaves_nothing_on_the_module(tmp_path, where):
    def fails(*_):
        raise ArithmeticError

    module, (make_writer, _) = ForeignTimes(), WRITERS["importance"]
    setattr(module, where, fails)
    trainer = make_trainer(tmp_path, make_writer(), num_sanity_val_steps=0)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader(), loader())
    assert both(module) == (None, None)


@pytest.mark.parametrize("name", WRITERS)
def test_a_module_needs_the_attributes_that_are_written_and_no_others(tmp_path, name):
    make_writer, (density, weight) = WRITERS[name]
    module = PlainModule()
    with pytest.raises(ValueError, match=r"needs a module with timestep_.*PlainModule lacks"):
        make_trainer(tmp_path, make_writer()).fit(module, loader())
    assert module.losses == []
    if density != weight:
        setattr(module, "timestep_density" if density else "timestep_weight", None)
        make_trainer(tmp_path, make_writer()).fit(module, loader())
        assert len(module.losses) == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [("curriculum", "weight"), ("curriculum", "importance"), ("weight", "resampler")],
)
def test_two_writers_of_an_attribute_are_refused_at_fit_start_and_others_go_together(
    tmp_path, first, second
):
    (make_first, writes_first), (make_second, writes_second) = WRITERS[first], WRITERS[second]
    module = ForeignTimes()
    trainer = make_trainer(tmp_path, make_first(), make_second())
    if any(a and b for a, b in zip(writes_first, writes_second, strict=True)):
        with pytest.raises(ValueError, match=r"both set timestep_.*; remove one of them"):
            trainer.fit(module, loader())
        assert module.visible == []
    else:
        trainer.fit(module, loader())
        assert all(None not in visible for visible in module.visible)


def test_an_attribute_that_the_user_has_set_is_refused_and_left_as_it_is(tmp_path):
    module, density = ForeignTimes(), torch.ones(7)
    module.timestep_density = density
    with pytest.raises(ValueError, match=r"other code has set it to a tensor of shape \(7,\)"):
        make_trainer(tmp_path, callbacks.TimestepCurriculum(6)).fit(module, loader())
    assert module.timestep_density is density
    make_trainer(tmp_path, callbacks.CurriculumWeight(6)).fit(module, loader())
    assert [visible for _, visible, _ in module.visible] == [density] * 4
    assert both(module) == (density, None)
