"""MeanFlow where the average velocity is known, its derivative, its limits, and a small fit."""

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from support.plain_module import make_trainer
from support.resuming import Recipe, assert_undisturbed
from support.tiny_diffusion import images
from torch import nn

from lit_diffusion.auxiliary_losses import ContrastiveFlow
from lit_diffusion.callbacks import (
    AdaptiveTimesteps,
    CurriculumWeight,
    ImportanceWeightedCurriculum,
    InfoNoise,
    LossDensity,
    LossSecondMomentResampler,
    TimestepCurriculum,
)
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.losses import DenoisingLoss, MinSNR, Simple, UncertaintyLoss
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.modules.mean_flow import MeanFlow
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import Patched
from lit_diffusion.networks.unet import UNet
from lit_diffusion.parameterizations import FlowVelocity, Velocity
from lit_diffusion.processes import CosineBetas, DiscreteVP, LinearFlow
from lit_diffusion.solvers import DDIM, DPMSolverPP, Euler
from lit_diffusion.timesteps import LogitNormal, Uniform

MEANS = torch.tensor([0.0, 0.7, -0.4])  # without a class, and of two classes
STD = 0.3
CLASSES = {"num_classes": 2, "label_dropout": 0.1}
SQUARED = {"equal_times": 0.0, "power": 0.0}  # squared error, r < t for all images


class At:
    """All times are the same."""

    def __init__(self, t):
        self.t = t

    def quantile(self, u, process):
        return torch.full_like(u, self.t)


def per_image(values):
    return values.view(-1, 1, 1, 1)


def gaussian_velocity(x, r, t, mean):
    """Average velocity of the flow of x0 ~ N(mean, STD**2).

    The flow keeps (x_t - (1 - t) * mean) / S_t with S_t**2 = ((1 - t) * STD)**2 + t**2. Here, the
    factor t - r of S_t**2 - S_r**2 is canceled.
    """
    s_t, s_r = (torch.sqrt(((1 - v) * STD) ** 2 + v**2) for v in (t, r))
    slope = (STD**2 * (t + r - 2) + t + r) / (s_t * (s_t + s_r))
    return slope * (x - (1 - t) * mean) - mean


class GaussianFlow(nn.Module):
    """The exact average velocity. For a class, it is extrapolated by `scale`, as in guidance."""

    two_times = True

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.labels = []

    def forward(self, x, noise_label, labels):
        self.labels.append(noise_label)
        if noise_label.ndim == 1:
            noise_label = torch.stack([noise_label, torch.zeros_like(noise_label)], 1)
        t, interval = (per_image(v.to(x.dtype)) for v in noise_label.unbind(1))
        labels = torch.full((len(x),), -1) if labels is None else labels
        means = MEANS.to(x)[[0] * len(x)], MEANS.to(x)[labels + 1]
        null, of_class = (gaussian_velocity(x, t - interval, t, per_image(m)) for m in means)
        return torch.where(per_image(labels) < 0, null, null.lerp(of_class, self.scale))


def make(network, kind=MeanFlow, **changes):
    arguments = {
        "process": LinearFlow(label_scale=1.0),
        "parameterization": FlowVelocity(),
        "loss": DenoisingLoss(Simple()),
        "times": Uniform(),
        "solver": Euler(1, clip=False),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        "image_shape": (1, 8, 8),
    }
    torch.manual_seed(0)
    return kind(network, **{**arguments, **changes})


def along_the_flow(t, labels=None):
    """Images and noise, float64, for which noise - x0 is the velocity of the flow at x_t."""
    labels = torch.full((len(t),), -1) if labels is None else labels
    t, mean = per_image(t), per_image(MEANS.double()[labels + 1])
    x_t = torch.randn(len(t), 1, 8, 8, dtype=torch.float64)
    v = gaussian_velocity(x_t, t, t, mean)
    return x_t - t * v, x_t + (1 - t) * v


# Where the average velocity is known


@pytest.mark.parametrize("r", [0.0, 0.3])
def test_the_true_average_velocity_equals_its_target(r):
    module = make(GaussianFlow(), times=At(r), **SQUARED).double()
    t = torch.linspace(r + 0.05, 1, 16, dtype=torch.float64)
    x0, noise = along_the_flow(t)
    assert module.per_sample_loss(x0, None, t, noise, step=0).max() < 1e-12
    average = module.network.forward
    module.network.forward = lambda x, label, labels: average(x, label[:, 0], labels)
    assert module.per_sample_loss(x0, None, t, noise, step=0).min() > 1e-6  # of the velocity


@pytest.mark.parametrize("kappa", [0.0, 0.5])
@pytest.mark.parametrize("scale", [2.5, 2.0])
def test_the_guided_velocity_equals_its_target(kappa, scale):
    guidance = {"guidance_scale": scale, "guidance_mix": kappa}
    parts = {"times": At(0.0), "equal_times": 1.0, "power": 0.0}
    module = make(GaussianFlow(scale=2.5), **parts, **guidance, **CLASSES).double()
    labels = torch.tensor([-1, 0, 1, 0])
    t = torch.tensor([0.2, 0.4, 0.6, 0.9], dtype=torch.float64)
    x0, noise = along_the_flow(t, labels)
    losses = module.per_sample_loss(x0, labels, t, noise, step=0)
    assert losses[0] < 1e-12  # the velocity without a class is not guided
    assert (losses[1:] < 1e-12).all() if scale == 2.5 else (losses[1:] > 1e-6).all()


@pytest.mark.parametrize(
    "solver", [Euler(1, clip=False), Euler(3, clip=False), DDIM(2, clip=False)]
)
def test_any_number_of_steps_maps_noise_to_the_gaussian(solver):
    module = make(GaussianFlow(), solver=solver, **CLASSES)
    labels, noise = torch.tensor([0, 1, -1]), torch.randn(3, 1, 8, 8)
    x0 = solver.sample(module.denoise_for(labels), module.process, noise, torch.randn_like)
    expected = per_image(MEANS[labels + 1]) + STD * noise
    atol = 0.01 if type(solver) is DDIM else 1e-5  # its grid starts at a log SNR of -10
    torch.testing.assert_close(x0, expected, rtol=0, atol=atol)
    assert len(module.network.labels) == solver.steps


@pytest.mark.parametrize(("solver", "average"), [(DPMSolverPP(2), []), (Euler(3, eta=1.0), [2])])
def test_steps_of_other_solvers_and_steps_with_noise_get_the_velocity(solver, average):
    module = make(GaussianFlow(), solver=solver)
    module.generate([0, 1])
    two_times = [i for i, labels in enumerate(module.network.labels) if labels.ndim == 2]
    assert two_times == average  # the last step adds no noise


def test_guidance_in_sampling_extrapolates_average_velocities():
    module, noise = make(GaussianFlow(), **CLASSES), torch.randn(2, 1, 8, 8)
    labels, null = torch.tensor([0, 1]), torch.tensor([-1, -1])
    denoise = ClassifierFree(2.0).guide(module.denoise_for, labels, module.process, null)
    x0 = module.solver.sample(denoise, module.process, noise, torch.randn_like)
    torch.testing.assert_close(x0, 2 * per_image(MEANS[1:]) + STD * noise)


# The target of any network


def random_weights(network):
    torch.manual_seed(1)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network


def unet(channels=1, mult=(1, 2), **changes):
    sizes = {"num_res_blocks": 1, "attention_downsample": (1,), "norm_groups": 2}
    network = UNet(channels, channels, 4, mult, **sizes, num_classes=2, two_times=True, **changes)
    return random_weights(network)


def dit():
    sizes = {"width": 16, "depth": 2, "num_heads": 2}
    return random_weights(DiT(8, 1, 1, **sizes, num_classes=2, two_times=True))


NETWORKS = {
    "DiT": dit,
    "UNet": unet,
    "checkpointing": lambda: unet(gradient_checkpointing=True),
    "Patched": lambda: Patched(unet(4, (1,)), 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_target_is_a_constant_with_the_derivative_along_the_flow(name):
    """Central differences in float64: target = v - (t - r) * du/dt, and its gradient is 0."""
    r, h = 0.25, 1e-5
    module = make(NETWORKS[name](), times=At(r), **SQUARED, **CLASSES).double()
    labels, t = torch.tensor([0, 1, -1]), torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    x0, noise = torch.randn(2, 3, 1, 8, 8, dtype=torch.float64)

    def u(t):
        x_t = per_image(1 - t) * x0 + per_image(t) * noise
        return module.network(x_t, torch.stack([t, t - r], 1), labels)

    derivative = (u(t + h) - u(t - h)).detach() / (2 * h)
    assert derivative.flatten(1).std(1).min() > 1e-3
    target = noise - x0 - per_image(t - r) * derivative
    expected = (target - u(t)).square().flatten(1).mean(1)
    losses = module.per_sample_loss(x0, labels, t, noise, step=0)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    parameters = list(module.parameters())
    gradients = [torch.autograd.grad(part.sum(), parameters) for part in (losses, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("weighting", [Simple(), MinSNR()])
def test_with_equal_times_it_is_flow_matching_to_the_bit(weighting):
    network, loss = unet(), DenoisingLoss(weighting)
    flow = make(network, DiffusionModule, loss=loss, **CLASSES)
    parts = {"times": At(0.0), "loss": loss, "equal_times": 1.0, "power": 0.0}
    mean_flow = make(network, **parts, **CLASSES)
    t, (x0, noise) = torch.rand(4, dtype=torch.float64), torch.randn(2, 4, 1, 8, 8)
    expected = flow.per_sample_loss(x0, None, t, noise, step=7)
    gradient = torch.autograd.grad(expected.sum(), network.out[2].weight)[0]
    for step in (7, None):
        losses = mean_flow.per_sample_loss(x0, None, t, noise, step)
        assert torch.equal(losses, expected)
        assert torch.equal(torch.autograd.grad(losses.sum(), network.out[2].weight)[0], gradient)


def test_the_adaptive_weight_divides_by_a_power_of_the_error_without_gradient():
    t, (x0, noise) = torch.rand(4, dtype=torch.float64), torch.randn(2, 4, 1, 8, 8)
    network, losses, gradients = unet(), {}, {}
    for power in (0.0, 0.5, 1.0):
        module = make(network, times=At(0.0), equal_times=1.0, power=power, **CLASSES)
        losses[power] = module.per_sample_loss(x0, None, t, noise, step=0)
        (gradients[power],) = torch.autograd.grad(losses[power][0], network.out[2].weight)
    for power in (0.5, 1.0):
        factor = (losses[0.0] + 1e-3 / 64) ** -power
        torch.testing.assert_close(losses[power], losses[0.0] * factor)
        torch.testing.assert_close(gradients[power], gradients[0.0] * factor[0])


@pytest.mark.parametrize("size", [8, 3, 1])
def test_the_fraction_of_equal_times_and_the_order_of_times(size):
    network = GaussianFlow()
    module, count = make(network, times=LogitNormal()), 0
    for _ in range(100):
        t, (x0, noise) = torch.rand(size, dtype=torch.float64), torch.randn(2, size, 1, 8, 8)
        network.labels.clear()
        module.per_sample_loss(x0, None, t, noise, step=0)
        later, interval = network.labels[0].double().unbind(1)
        assert (later >= t.float()).all()
        assert ((interval >= 0) & (interval <= later)).all()
        different = int((interval > 0).sum())
        assert different == 2 or size != 8
        count += different
    assert count / 100 / size == pytest.approx(0.25, abs=0.1)


# Precision, compilation, resuming


def losses_of(module, step=0):
    torch.manual_seed(2)
    t, (x0, noise) = torch.rand(8, dtype=torch.float64), torch.randn(2, 8, 1, 8, 8)
    losses = module.per_sample_loss(x0, torch.arange(8) % 3 - 1, t, noise, step)
    return losses, torch.autograd.grad(losses.sum(), list(module.parameters()))


@pytest.mark.parametrize("network", [unet, dit])
def test_in_bfloat16_the_loss_is_close(network):
    module = make(network(), **CLASSES, power=0.0)
    losses, _ = losses_of(module)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = losses_of(module)
    torch.testing.assert_close(rounded, losses, rtol=0.03, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("network", [unet, dit])
def test_a_compiled_network_has_the_same_loss_and_gradients(network):
    module = make(network(), **CLASSES, guidance_scale=2.0)
    expected = losses_of(module)
    module.network.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(losses_of(module), expected)


def small_mean_flow():
    network = UNet(1, 1, 4, (1, 2), num_res_blocks=1, norm_groups=2, num_classes=10, two_times=True)
    return make(network, num_classes=10, label_dropout=0.1, guidance_scale=1.5)


@pytest.mark.slow
def test_a_resumed_fit_has_the_same_bits(tmp_path):
    assert_undisturbed(tmp_path, Recipe(module=small_mean_flow), 4)


@pytest.mark.parametrize("network", [UNet, DiT])
def test_without_two_times_networks_keep_their_names_and_with_them_they_start_alike(network):
    sizes = {"norm_groups": 8} if network is UNet else {"depth": 1, "num_heads": 2}
    first = (1, 1, 32) if network is UNet else (8, 1, 1)
    plain, both = network(*first, **sizes), network(*first, **sizes, two_times=True)
    added = both.state_dict().keys() - plain.state_dict().keys()
    assert len(added) == 4
    assert all(".interval." in name for name in added)
    random_weights(plain)
    both.load_state_dict(plain.state_dict(), strict=False)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([0.5, 1.0])
    assert torch.equal(plain(x, t), both(x, torch.stack([t, t - 0.25], 1)))


# A fit


class SmallMLP(nn.Sequential):
    """A network of one pixel and two times."""

    two_times = True

    def __init__(self):
        layers = [nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)]
        super().__init__(*layers)

    def forward(self, x, noise_label, condition):
        if noise_label.ndim == 1:
            noise_label = torch.stack([noise_label, torch.zeros_like(noise_label)], 1)
        return per_image(super().forward(torch.cat([x.flatten(1), noise_label.to(x)], 1)))


def two_modes(num):
    return per_image(torch.randint(0, 2, (num,)) * 2.0 - 1) + 0.3 * torch.randn(num, 1, 1, 1)


@pytest.mark.slow
def test_a_fit_learns_to_sample_in_one_step():
    """Where a step of flow matching ends in the mean of the two modes."""
    module = make(SmallMLP(), equal_times=0.5, power=0.0, image_shape=(1, 1, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2000)
    for step in range(2000):
        x0, t = two_modes(512), torch.rand(512, dtype=torch.float64)
        optimizer.zero_grad()
        module.per_sample_loss(x0, None, t, torch.randn_like(x0), step).mean().backward()
        optimizer.step()
        schedule.step()
    noise = torch.randn(2000, 1, 1, 1)

    def wasserstein_distance(x0):
        return (x0.flatten().sort().values - two_modes(2000).flatten().sort().values).abs().mean()

    x0 = module.solver.sample(module.denoise_for(None), module.process, noise, torch.randn_like)
    assert wasserstein_distance(x0) < 0.2
    flow_matching = noise - module.network(noise, torch.ones(2000), None)
    assert wasserstein_distance(flow_matching) > 0.5


def test_the_loss_is_logged_without_quartiles_of_one_of_its_two_times(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, log_every_n_steps=1)
    trainer.fit(small_mean_flow(), images(8, 8))
    names = [name for name in trainer.callback_metrics if name.startswith("train/loss")]
    assert names == ["train/loss"]


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process": DiscreteVP(CosineBetas(9)), "parameterization": Velocity()}, "LinearFlow"),
        ({"parameterization": Velocity()}, "MeanFlow needs FlowVelocity, got Velocity"),
        ({"loss": UncertaintyLoss(Simple())}, "MeanFlow needs DenoisingLoss, got Uncertainty"),
        ({"network": UNet(1, 1, 32)}, "two times, got UNet; pass two_times=True"),
        ({"equal_times": 1.5}, r"equal_times must be in \[0, 1\].* got 1.5"),
        ({"power": -1.0}, "power >= 0 .* got 0.75, -1.0"),
        ({"guidance_mix": 1.0}, r"guidance_mix in \[0, 1\), got .* 1.0"),
        ({"guidance_scale": 2.0}, "needs label_dropout > 0, got 2.0"),
        ({"auxiliary_loss": ContrastiveFlow()}, "got auxiliary_loss=ContrastiveFlow; leave it out"),
    ],
)
def test_mistakes_are_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"network": GaussianFlow(), **changes})


@pytest.mark.parametrize("callback", [InfoNoise, AdaptiveTimesteps])
def test_callbacks_that_compute_errors_from_losses_are_refused(tmp_path, callback):
    trainer = make_trainer(tmp_path, callback())
    with pytest.raises(ValueError, match=f"{callback.__name__} needs .* of MeanFlow .* two times"):
        trainer.fit(small_mean_flow(), images(8, 8))


@pytest.mark.parametrize(
    "callback",
    [
        LossDensity(),
        LossSecondMomentResampler(num_bins=4),
        CurriculumWeight(num_steps=2),
        ImportanceWeightedCurriculum(num_steps=2),
    ],
)
def test_losses_and_weights_of_one_time_are_refused_but_not_a_density(tmp_path, callback):
    make_trainer(tmp_path, TimestepCurriculum(num_steps=2)).fit(small_mean_flow(), images(8, 8))
    with pytest.raises(ValueError, match=r"MeanFlow (trains each image at two times|returned)"):
        make_trainer(tmp_path, callback).fit(small_mean_flow(), images(8, 8))


def test_a_strategy_that_splits_weights_is_explained(tmp_path):
    module = make(GaussianFlow())
    module.trainer = make_trainer(tmp_path)
    module.configure_model()
    module.trainer._accelerator_connector.strategy = ModelParallelStrategy()
    with pytest.raises(ValueError, match=r"forward mode.*; use strategy='ddp'"):
        module.configure_model()
