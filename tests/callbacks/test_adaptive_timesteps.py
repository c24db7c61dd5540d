from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from scipy.stats import beta
from sklearn.feature_selection import SelectKBest, f_regression
from support.foreign_times import ForeignTimes, to_lists
from support.memory_logger import MemoryLogger
from support.plain_module import assert_same_bits, loader, make_trainer
from support.spawn import rank_and_size, spawn
from support.tiny_diffusion import NUM_CLASSES, images, tiny_diffusion
from torch import nn

from lit_diffusion.callbacks import AdaptiveTimesteps
from lit_diffusion.callbacks.adaptive_timesteps import beta_log_density, select_bins
from lit_diffusion.callbacks.curriculum import total_variation
from lit_diffusion.losses import DenoisingLoss, HybridLoss, MinSNR, Simple
from lit_diffusion.networks.dit import DiT
from lit_diffusion.parameterizations import Epsilon
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, ZeroTerminalSNR

# The density


def shapes(a, b):
    """Parameters whose softplus is (a, b)."""
    return torch.tensor([a, b], dtype=torch.float64).expm1().log()


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.4, 3.0), (5.0, 2.0)])
def test_the_density_is_that_of_beta_at_the_centers_of_bins(a, b):
    u = (np.arange(50) + 0.5) / 50
    expected = beta.pdf(u, a, b) / beta.pdf(u, a, b).sum()
    density = beta_log_density(shapes(a, b), 50).exp()
    torch.testing.assert_close(density, torch.from_numpy(expected))
    assert density.sum().item() == pytest.approx(1)


def test_no_probability_is_zero_however_narrow_the_density():
    assert beta_log_density(shapes(60.0, 60.0), 100).exp().min() > 0


def test_times_are_uniform_at_first():
    torch.testing.assert_close(AdaptiveTimesteps(7).density_at(), torch.full((7,), 1 / 7).double())


def exact_gain(parameters, rewards, entropy_weight):
    """Expected reward and entropy, over all bins instead of samples."""
    log_density = beta_log_density(parameters, len(rewards))
    density = log_density.exp()
    return density @ rewards - entropy_weight * density @ log_density


def test_samples_give_the_gradient_of_the_expected_reward():
    """The first step of Adam goes by lr in the direction of the sign, so signs are compared.

    Every bin occurs as often as its probability says, and its reward is divided by the RMS.
    """
    rewards = torch.tensor([0.1, 0.3, -0.2, 1.0, 2.0], dtype=torch.float64)
    callback = AdaptiveTimesteps(5, num_selected=1, lr=0.1, entropy_weight=0.3)
    before = callback.state_dict()["parameters"].requires_grad_()
    scaled = rewards / rewards.square().mean().sqrt()
    gradient = torch.autograd.grad(exact_gain(before, scaled, 0.3), before)[0]
    callback.learn(torch.arange(5), rewards)  # the density is uniform
    moment = callback.state_dict()["optimizer"]["state"][0]["exp_avg"]
    torch.testing.assert_close(moment, -0.1 * gradient)  # 1 - beta1 of Adam
    step = callback.state_dict()["parameters"] - before.detach()
    torch.testing.assert_close(step, 0.1 * gradient.sign(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("best", [0.2, 0.8])
def test_the_density_moves_to_the_noise_level_with_rewards(best):
    callback = AdaptiveTimesteps(20, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    u = (torch.arange(20).double() + 0.5) / 20
    reward = torch.exp(-(((u - best) / 0.1) ** 2))
    for _ in range(300):
        drawn = torch.multinomial(callback.density_at(), 64, replacement=True, generator=generator)
        callback.learn(drawn, 1e-5 * reward[drawn])
    density = callback.density_at()
    assert abs(u[density.argmax()] - best) < 0.1
    assert density @ reward > 2 * reward.mean()


def test_the_entropy_pulls_back_to_uniform_without_a_preference():
    callback = AdaptiveTimesteps(10, lr=0.05, entropy_weight=1.0)
    state = callback.state_dict()
    callback.load_state_dict({**state, "parameters": shapes(4.0, 1.5)})
    before = total_variation(callback.density_at())
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = torch.multinomial(callback.density_at(), 512, replacement=True, generator=generator)
        callback.learn(drawn, torch.full((512,), 1e-3).double())
    assert total_variation(callback.density_at()) < before / 4


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_rewards_that_say_nothing_change_nothing(rewards):
    callback = AdaptiveTimesteps(4)
    before = callback.density_at()
    callback.learn(torch.tensor([0, 3]), torch.tensor(rewards).double())
    assert torch.equal(callback.density_at(), before)


# The bins of the reward


def test_bins_are_those_with_the_largest_f_statistic():
    for seed in range(5):
        rows = torch.rand(6, 30, generator=torch.Generator().manual_seed(seed)).double()
        rows[:, 11] = 3  # without any variation
        best = SelectKBest(f_regression, k=4).fit(rows.numpy(), rows.sum(1).numpy())
        expected = best.get_support(indices=True).tolist()
        assert select_bins(rows, 4).tolist() == expected


def test_bins_are_selected_even_if_nothing_varies():
    assert len(select_bins(torch.ones(3, 5).double(), 2).unique()) == 2


# In a fit


class Recorder(AdaptiveTimesteps):
    """Records bins and rewards from which it learns."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.learned = []

    def learn(self, bins, rewards):
        self.learned.append((bins, rewards, self.state_dict()["selected"].tolist()))
        super().learn(bins, rewards)


def bound_terms(module, x0, labels, noise, num_bins):
    """(num_bins, B) terms of the variational bound: half of the error of x0 times the fall of SNR.

    They are computed for ContinuousVP and Velocity, without the functions of the callback.
    """
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    terms = []
    for i in range(num_bins):
        part = torch.linspace(edges[i], edges[i + 1], 2001, dtype=torch.float64)
        alpha, sigma = module.process.alpha_sigma(module.process.from_unit(part))
        log_snr = -2 * (sigma / alpha).clamp(0.002, 80).log()
        share = (-log_snr.diff() / 2 * torch.sigmoid((log_snr[1:] + log_snr[:-1]) / 2)).sum()
        t = module.process.from_unit((edges[i] + edges[i + 1]) / 2).expand(len(x0))
        a, s = (scale.view(-1, 1, 1, 1) for scale in module.process.alpha_sigma(t))
        x_t = (a * x0 + s * noise).float()
        output = module.network(x_t, module.process.noise_label(t).float(), labels)
        terms.append(share * (a * noise - s * x0 - output).square().mean((1, 2, 3)))
    return torch.stack(terms)


@pytest.mark.parametrize("weighting", [Simple(), MinSNR()], ids=repr)
def test_rewards_are_reductions_of_the_variational_bound_by_the_update(tmp_path, weighting):
    """Whatever the weights of the loss are."""
    module = tiny_diffusion(process=ContinuousVP(), loss=DenoisingLoss(weighting))
    callback = Recorder(8, every_n_steps=2, num_selected=3)
    objective, known = callback._objective, []

    def recorded(trainer, pl_module):
        result = objective(trainer, pl_module)
        x0, labels, noise = callback._batch
        pl_module.eval()
        with torch.no_grad():
            known.append(bound_terms(pl_module, x0, labels, noise, 8))
        pl_module.train()
        return result

    callback._objective = recorded
    make_trainer(tmp_path, callback, max_epochs=1).fit(module, images(64, 16))
    assert len(callback.learned) == 2
    for (_, rewards, selected), before, after in zip(
        callback.learned, known[::2], known[1::2], strict=True
    ):
        expected = (before - after)[selected].sum(0)
        torch.testing.assert_close(rewards, expected.double(), rtol=1e-2, atol=1e-5)
        assert rewards.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compiled_network_gives_the_same_rewards(tmp_path, monkeypatch, precision):
    by_eager = partial(nn.Module.compile, backend="aot_eager")  # in seconds
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode, **how: by_eager(self, **how))
    learned = []
    for mode in (None, "default"):
        module, callback = tiny_diffusion(compile=mode), Recorder(6, every_n_steps=1)
        module.network.dropout.p = 0.0
        options = {"max_epochs": 1, "precision": precision}
        make_trainer(tmp_path, callback, **options).fit(module, images(16, 8))
        learned.append(callback.learned)
    for (bins, rewards, _), (same_bins, same_rewards, _) in zip(*learned, strict=True):
        assert torch.equal(bins, same_bins)
        tolerance = 1e-5 if precision == "32-true" else 0.1 * rewards.abs().max().item()
        torch.testing.assert_close(rewards, same_rewards, rtol=1e-3, atol=tolerance)
        assert rewards.abs().max() > 1e-3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_learns_from_the_batch_of_every_nth_update(tmp_path, accumulate):
    module, callback, drawn = tiny_diffusion(), Recorder(4, every_n_steps=3, num_selected=2), []
    step = module.training_step

    def training_step(*args):
        outputs = step(*args)
        drawn.append((outputs["u"], module.timestep_density))
        return outputs

    measured, objective = [], callback._objective
    callback._objective = lambda *args: measured.append(len(drawn) - 1) or objective(*args)
    module.training_step = training_step
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    make_trainer(tmp_path, callback, **options).fit(module, images(6 * 8 * accumulate, 8))
    used = [accumulate * (n + 1) - 1 for n in range(0, 12, 3)]  # last batches of updates
    assert measured == [i for last in used for i in (last - 1, last)]  # before and after it alone
    bins = [(drawn[i][0] * 4).long().tolist() for i in used]
    assert [row.tolist() for row, _, _ in callback.learned] == bins
    assert callback.learned[0][2] == [1, 3]
    changes = [i for i in range(1, len(drawn)) if not torch.equal(drawn[i][1], drawn[i - 1][1])]
    assert changes == [i + 1 for i in used[:4]]
    assert module.timestep_density is None
    assert callback.state_dict()["queue"].shape == (4, 4)


def test_bins_are_selected_from_the_last_20_measurements_unless_queue_size_differs(tmp_path):
    """If all bins are selected, the run does not depend on the number of measurements."""
    queues = []
    for options in ({}, {"queue_size": 3}):
        callback = AdaptiveTimesteps(2, every_n_steps=1, num_selected=2, **options)
        make_trainer(tmp_path, callback, max_epochs=1).fit(tiny_diffusion(), images(21 * 4, 4))
        queues.append(callback.state_dict()["queue"])
    assert len(queues[0]) == 20
    assert torch.equal(queues[1], queues[0][-3:])


def test_the_density_is_logged(tmp_path):
    logger, callback = MemoryLogger(), AdaptiveTimesteps(6, every_n_steps=1, lr=0.1)
    options = {"logger": logger, "max_epochs": 2, "log_every_n_steps": 1}
    make_trainer(tmp_path, callback, **options).fit(tiny_diffusion(), images(48, 8))
    means = [value for _, value in logger.of("adaptive_timesteps/mean")]
    distances = [value for _, value in logger.of("adaptive_timesteps/tv")]
    assert means[0] == pytest.approx(0.5)
    assert distances[0] == pytest.approx(0, abs=1e-12)
    assert distances[-1] > 0.01


def test_a_second_fit_of_the_module_goes_on_and_another_module_starts_anew(tmp_path):
    callback, module = AdaptiveTimesteps(4, every_n_steps=1), tiny_diffusion()
    make_trainer(tmp_path, callback, max_epochs=1).fit(module, images(16, 8))
    first = callback.density_at()
    make_trainer(tmp_path, callback, max_epochs=0).fit(module, images(16, 8))
    assert torch.equal(callback.density_at(), first)
    assert total_variation(first) > 0
    make_trainer(tmp_path, callback, max_epochs=0).fit(tiny_diffusion(), images(16, 8))
    assert total_variation(callback.density_at()) == pytest.approx(0)


def dit():
    sizes = {"image_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 2}
    return DiT(**sizes, width=8, depth=1, num_heads=1, num_classes=NUM_CLASSES)


def train_rank(folder):
    """State of the callback and first weights, of a rank whose images differ from other ranks'."""
    callback, module = AdaptiveTimesteps(4, every_n_steps=1), tiny_diffusion()
    options = {"devices": rank_and_size()[1], "strategy": "ddp", "max_epochs": 1}
    make_trainer(folder, callback, **options).fit(module, images(48, 8))
    state = callback.state_dict()
    return [to_lists(state[name]) for name in ("parameters", "queue", "selected")]


@pytest.mark.system
def test_ranks_learn_the_same(tmp_path):
    zero, one = spawn(train_rank, 2, tmp_path)
    assert zero == one
    assert zero[0] != AdaptiveTimesteps(4).state_dict()["parameters"].tolist()


def train_sharded_rank(folder):
    """Number of measurements of a rank whose batches are smaller on rank 1."""
    rank, ranks = rank_and_size()
    callback, module = AdaptiveTimesteps(9, every_n_steps=1), tiny_diffusion(network=dit())
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    options = {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
    make_trainer(folder, callback, **options).fit(module, images(10 - 2 * rank, 5 - rank))
    return len(callback.state_dict()["queue"]), callback.density_at().tolist()


@pytest.mark.slow
def test_ranks_with_split_weights_may_have_batches_of_different_sizes(tmp_path):
    """Each forward pass gathers the weights, so all ranks need the same number of them."""
    zero, one = spawn(train_sharded_rank, 2, tmp_path, timeout=100)
    assert zero == one
    assert zero[0] == 2


# State and mistakes


class WithoutClean(Simple):
    """No weight at low noise levels."""

    def weight(self, alpha, sigma, output_scale, step):
        return (sigma > alpha).double()


def test_a_loaded_state_learns_on_as_the_one_that_was_saved():
    first, second = (AdaptiveTimesteps(4, num_selected=2) for _ in range(2))
    bins, rewards = torch.tensor([0, 1, 3]), torch.tensor([1.0, 0.5, 0.1]).double()
    first.learn(bins, rewards)
    second.load_state_dict(first.state_dict())
    for callback in (first, second):
        callback.learn(bins, rewards)
    assert_same_bits(second.state_dict(), first.state_dict())
    assert torch.equal(second.density_at(), first.density_at())


def test_a_changed_lr_applies_to_a_loaded_state():
    first, second, third = (AdaptiveTimesteps(4, lr=lr) for lr in (0.01, 0.1, 0.1))
    second.load_state_dict(first.state_dict())
    for callback in (second, third):
        callback.learn(torch.tensor([0, 1]), torch.tensor([1.0, 0.5]).double())
    assert torch.equal(second.density_at(), third.density_at())


def test_a_checkpoint_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"4 bins, of which 3 are .*num_bins=5, .*use the numbers"):
        AdaptiveTimesteps(5).load_state_dict(AdaptiveTimesteps(4).state_dict())


def test_other_modules_and_losses_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, AdaptiveTimesteps())
    with pytest.raises(TypeError, match="needs a module with per_sample_loss"):
        trainer.fit(ForeignTimes(), loader())
    hybrid = tiny_diffusion(parameterization=Epsilon(), loss=DenoisingLoss(Simple()))
    hybrid.loss = HybridLoss(Simple())
    with pytest.raises(ValueError, match="HybridLoss adds other terms; use DenoisingLoss"):
        make_trainer(tmp_path, AdaptiveTimesteps()).fit(hybrid, images(8, 8))


def test_a_time_without_signal_and_weight_counts_nothing(tmp_path):
    process = DiscreteVP(ZeroTerminalSNR(CosineBetas(8)))
    module = tiny_diffusion(process=process, loss=DenoisingLoss(MinSNR()))
    callback = AdaptiveTimesteps(8, every_n_steps=1)
    make_trainer(tmp_path, callback, max_epochs=1).fit(module, images(16, 8))
    queue = callback.state_dict()["queue"]
    assert len(queue) == 2
    assert queue[:, -1].tolist() == [0, 0]
    assert (queue[:, :-1] != 0).all()


def test_a_loss_without_weight_at_some_noise_levels_is_refused(tmp_path):
    module = tiny_diffusion(loss=DenoisingLoss(WithoutClean()))
    with pytest.raises(ValueError, match="AdaptiveTimesteps divides by the weight of the loss"):
        make_trainer(tmp_path, AdaptiveTimesteps()).fit(module, images(8, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_selected": 0},
        {"num_selected": 101},
        {"every_n_steps": 0},
        {"queue_size": 1},
        {"lr": 0.0},
        {"entropy_weight": -1.0},
    ],
)
def test_bad_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        AdaptiveTimesteps(**wrong)
