from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from support.foreign_times import ForeignTimes
from support.memory_logger import MemoryLogger
from support.plain_module import loader, make_trainer
from support.tiny_diffusion import images, losses_of, tiny_diffusion
from support.toy import FloatCodec
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import InfoNoise
from lit_diffusion.callbacks.curriculum import total_variation
from lit_diffusion.callbacks.info_noise import noise_levels, velocity_error, x0_weight
from lit_diffusion.callbacks.loss_resampler import LossHistory
from lit_diffusion.gaussian import expand_as
from lit_diffusion.losses import DenoisingLoss, FDMWarmup, HybridLoss, MinSNR, Simple
from lit_diffusion.parameterizations import (
    EDMPreconditioning,
    Epsilon,
    FlowVelocity,
    Sample,
    Velocity,
)
from lit_diffusion.processes import (
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearFlow,
    ZeroTerminalSNR,
)
from lit_diffusion.solvers import DDIM
from lit_diffusion.timesteps import LogitNormal, LogNormal, Uniform

STD = 0.5  # of Gaussian data


def parts(process, times, parameterization, weighting):
    """What the callback reads of a module."""
    return SimpleNamespace(
        process=process,
        times=times,
        parameterization=parameterization,
        loss=DenoisingLoss(weighting),
    )


RECIPES = {
    "velocity": parts(DiscreteVP(CosineBetas(1000)), Uniform(), Velocity(), Simple()),
    "noise": parts(DiscreteVP(CosineBetas(1000)), Uniform(), Epsilon(), Simple()),
    "min-snr": parts(ContinuousVP(), Uniform(), Velocity(), MinSNR()),
    "flow": parts(LinearFlow(), LogitNormal(), FlowVelocity(), Simple()),
    "edm": parts(EDMProcess(), LogNormal(), EDMPreconditioning(), Simple()),
}


def started(callback, recipe):
    """The callback in a fit of a module, without a Trainer's other hooks."""
    recipe.timestep_density = None
    callback.on_fit_start(SimpleNamespace(callbacks=[], ckpt_path=None, global_step=0), recipe)
    return callback


def information(log_snr):
    """Mutual information of x0 ~ N(0, STD**2) and x_t."""
    return 0.5 * torch.log1p(STD**2 * log_snr.exp())


def gaussian_density(recipe, num_bins, gate_sigma, fine=4000):
    """What InfoNoise must arrive at, from differences of the information on a fine grid."""
    u = torch.linspace(0, 1, num_bins * fine + 1, dtype=torch.float64)
    if (steps := recipe.process.num_steps) is not None:
        edges = (u * steps).clamp(max=steps - 1)  # times between the steps as well
    else:
        edges = recipe.times.quantile(u.clamp(max=1 - 2**-53), recipe.process)
    alpha, sigma = recipe.process.alpha_sigma(edges)
    ratio = (sigma / alpha).clamp(0.002, 80)
    gain = -information(-2 * ratio.log()).diff()
    middle = (ratio[1:] * ratio[:-1]).sqrt()
    middle_t = recipe.process.at_log_snr(-2 * middle.log())
    weight = x0_weight(recipe, *recipe.process.alpha_sigma(middle_t), None)
    mass = gain * middle**3 / (middle**3 + gate_sigma**3) / weight
    mass = mass.reshape(num_bins, fine).sum(1)
    return mass / mass.sum()


def optimal_errors(recipe, u):
    """Errors of the velocity of the best network on Gaussian data."""
    alpha, sigma = recipe.process.alpha_sigma(recipe.times.quantile(u, recipe.process))
    return STD**2 * (alpha**2 + sigma**2) / (alpha**2 * STD**2 + sigma**2)


# The estimate


@pytest.mark.parametrize("weighting", [Simple(), MinSNR()], ids=repr)
@pytest.mark.parametrize(
    "parameterization",
    [Sample(), Velocity(), FlowVelocity(), EDMPreconditioning()],
    ids=repr,
)
@pytest.mark.parametrize("process", [ContinuousVP(), LinearFlow(), EDMProcess()], ids=repr)
def test_losses_determine_the_errors_of_x0(process, parameterization, weighting):
    recipe = parts(process, Uniform(), parameterization, weighting)
    generator = torch.Generator().manual_seed(0)
    x0, noise, output = torch.randn(3, 8, 1, 2, 2, dtype=torch.float64, generator=generator)
    u = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    t = recipe.times.quantile(u, process)
    alpha, sigma = (expand_as(scale, x0) for scale in process.alpha_sigma(t))
    estimate = parameterization.to_x0(output, alpha * x0 + sigma * noise, alpha, sigma)
    error = (1 + (alpha / sigma) ** 2) * (estimate - x0) ** 2
    arguments = {"process": process, "parameterization": parameterization, "loss": recipe.loss}
    losses = losses_of(output, x0, t, noise, **arguments)
    result = velocity_error(recipe, u, losses, None)
    torch.testing.assert_close(result, error.mean((1, 2, 3)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gate_sigma", [0.0, 0.15])
@pytest.mark.parametrize("name", RECIPES)
def test_the_density_follows_the_entropy_rate_of_gaussian_data(name, gate_sigma):
    recipe, num_bins = RECIPES[name], 20
    callback = started(InfoNoise(num_bins, 50, 1e-9, gate_sigma), recipe)
    u = (torch.arange(num_bins * 50, dtype=torch.float64) + 0.5) / (num_bins * 50)
    errors = optimal_errors(recipe, u).reshape(num_bins, 50)
    density = callback.density(LossHistory(errors, torch.full((num_bins,), 50)))
    assert density.sum().item() == pytest.approx(1)
    known = gaussian_density(recipe, num_bins, gate_sigma)
    assert (density - known).abs().sum() / 2 < 0.02
    assert total_variation(known) > 0.1  # more than ten times as far from uniform


def test_density_times_weight_does_not_depend_on_the_loss():
    """A loss with a tenth of the weight at a noise level gets ten times the samples there."""
    history = LossHistory(torch.rand(400, 1).double() + 0.1, torch.ones(400).long())
    shares = []
    for parameterization, weighting in ((Velocity(), Simple()), (Sample(), MinSNR())):
        recipe = parts(ContinuousVP(), Uniform(), parameterization, weighting)
        callback = started(InfoNoise(400, 1, 1e-9), recipe)
        _, alpha, sigma = (part[:, 8] for part in noise_levels(recipe, 400))
        share = callback.density(history) * x0_weight(recipe, alpha, sigma, None)
        shares.append(share / share.sum())
    assert (shares[0] - shares[1]).abs().sum() / 2 < 0.01


def test_a_last_time_without_signal_gets_a_finite_probability():
    process = DiscreteVP(ZeroTerminalSNR(CosineBetas(100)))
    recipe = parts(process, Uniform(), Velocity(), MinSNR())
    callback = started(InfoNoise(100, 1, 0.2), recipe)
    history = LossHistory(torch.ones(100, 1).double(), torch.ones(100).long())
    density = callback.density(history)
    assert density.sum().item() == pytest.approx(1)
    assert density[-1].item() == pytest.approx(0.2 / 100)
    assert (density[:-1] > 0.2 / 100).all()


def test_no_noise_level_has_probability_zero_and_all_are_uniform_at_first():
    callback = started(InfoNoise(10, 2, 0.3), RECIPES["velocity"])
    errors = torch.zeros(10, 2, dtype=torch.float64)
    errors[4] = 1.0
    density = callback.density(LossHistory(errors, torch.full((10,), 2)))
    expected = torch.full((10,), 0.03).double()
    expected[4] = 0.73
    torch.testing.assert_close(density, expected)
    partly = torch.full((10,), 2)
    partly[7] = 1
    assert callback.density(LossHistory(errors, partly)).tolist() == [1.0] * 10


# In a fit


class OptimalVelocity(nn.Module):
    """The best velocity for x0 ~ N(0, STD**2), with a weight that changes nothing."""

    def __init__(self, process):
        super().__init__()
        self.process = process
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x, noise_label, condition):
        alpha, sigma = self.process.alpha_sigma(noise_label.double())
        factor = alpha * sigma * (1 - STD**2) / (alpha**2 * STD**2 + sigma**2)
        return expand_as(factor, x) * x + 0 * self.unused


def gaussian_images(num, batch_size):
    x0 = STD * torch.randn(num, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    index = torch.arange(num)
    return DataLoader(TensorDataset(x0, index % 3, index), batch_size=batch_size)


def test_training_draws_times_of_gaussian_data_from_the_known_density(tmp_path):
    """The losses of the best network are those of which the formula speaks."""
    recipe, num_bins = RECIPES["velocity"], 8
    process = recipe.process
    module = tiny_diffusion(
        network=OptimalVelocity(process), process=process, codec=FloatCodec(), num_classes=None,
        label_dropout=0.0, solver=DDIM(3, clip=False),
    )  # fmt: skip
    drawn, densities = [], []
    callback = InfoNoise(num_bins, history=256, uniform_prob=0.01)
    step = module.training_step

    def training_step(*args):
        outputs = step(*args)
        densities.append(module.timestep_density)
        drawn.append(outputs["u"])
        return outputs

    module.training_step = training_step
    make_trainer(tmp_path, callback, max_epochs=30).fit(module, gaussian_images(2048, 512))
    known = 0.99 * gaussian_density(recipe, num_bins, 0.15) + 0.01 / num_bins
    assert torch.equal(densities[0], torch.ones(num_bins).double())
    last = torch.stack(densities[-20:])
    assert torch.allclose(last.sum(1), torch.ones(20).double())
    assert ((last - known).abs().sum(1) / 2).max() < 0.02
    assert total_variation(known) > 0.1
    counts = torch.bincount((torch.cat(drawn[-20:]) * num_bins).long(), minlength=num_bins)
    expected = last.mean(0) * counts.sum()
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001
    uniform = counts.sum().repeat(num_bins) / num_bins
    assert chisquare(counts.numpy(), uniform.numpy()).pvalue < 1e-6


def test_recorded_errors_do_not_depend_on_a_weight_that_changes_in_training(tmp_path):
    module = tiny_diffusion(label_dropout=0.0, loss=DenoisingLoss(FDMWarmup(Simple(), 6)))
    module.network.dropout.p = 0.0
    plain = DenoisingLoss(Simple())
    errors, per_sample_loss = [], module.per_sample_loss

    def recorded(x0, condition, t, noise, step=None):
        warming, module.loss = module.loss, plain  # the error of a VP velocity is its loss
        errors.append(per_sample_loss(x0, condition, t, noise).detach())
        module.loss = warming
        return per_sample_loss(x0, condition, t, noise, step)

    module.per_sample_loss = recorded
    callback = InfoNoise(2, history=32)
    make_trainer(tmp_path, callback, max_epochs=4).fit(module, images(16, 8))
    losses, seen = callback.state_dict().values()
    assert seen.sum() == 64 == len(torch.cat(errors))
    stored = torch.cat([row[:n] for row, n in zip(losses, seen.tolist(), strict=True)])
    torch.testing.assert_close(
        stored.sort().values, torch.cat(errors).double().sort().values, rtol=1e-5, atol=1e-6
    )


def test_a_bin_without_weight_does_not_keep_the_density_uniform(tmp_path):
    process = DiscreteVP(ZeroTerminalSNR(CosineBetas(4)))
    module = tiny_diffusion(process=process, loss=DenoisingLoss(MinSNR()))
    callback = InfoNoise(4, history=2, uniform_prob=0.2)
    make_trainer(tmp_path, callback, max_epochs=2).fit(module, images(16, 8))
    losses, seen = callback.state_dict().values()
    assert seen[-1] == 0 < seen[:-1].min()
    density = callback.density(LossHistory(losses, seen))
    assert density[-1].item() == pytest.approx(0.2 / 4)
    assert total_variation(density) > 0.1


def test_full_bins_and_the_distance_from_uniform_are_logged(tmp_path):
    logger = MemoryLogger()
    options = {"logger": logger, "max_epochs": 4, "log_every_n_steps": 1}
    callback = InfoNoise(2, history=6)
    make_trainer(tmp_path, callback, **options).fit(tiny_diffusion(), images(16, 8))
    full = [value for _, value in logger.of("info_noise/full")]
    distances = [value for _, value in logger.of("info_noise/tv")]
    assert full[0] == 0 < full[-1] == 1
    assert distances[0] == 0 < distances[-1]


# Mistakes


class WithoutClean(Simple):
    """No weight at low noise levels."""

    def weight(self, alpha, sigma, output_scale, step):
        return (sigma > alpha).double()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ForeignTimes(), "ForeignTimes lacks process and times and parameterization"),
        (
            tiny_diffusion(loss=DenoisingLoss(WithoutClean())),
            "has the weight 0 at some noise levels; use",
        ),
    ],
)
def test_a_module_whose_losses_say_nothing_of_x0_is_refused(tmp_path, module, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, InfoNoise()).fit(module, loader())


def test_a_loss_with_other_terms_is_refused():
    recipe = parts(DiscreteVP(CosineBetas(100)), Uniform(), Epsilon(), Simple())
    recipe.loss = HybridLoss(Simple())
    with pytest.raises(ValueError, match="HybridLoss adds other terms; use DenoisingLoss"):
        started(InfoNoise(), recipe)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"gate_sigma is a noise level.*got -1"):
        InfoNoise(gate_sigma=-1)
    with pytest.raises(ValueError, match="only after the start of a fit"):
        InfoNoise().density(LossHistory.empty(64, 64))
