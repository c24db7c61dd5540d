"""Contrastive flow matching: its term, the bias of its optimum in closed form, the correction."""

import pytest
import torch
from support.golden import PIX, Z, close
from support.plain_module import make_trainer
from support.tiny_diffusion import FixedOutput, images, tiny_diffusion
from torch import nn

from lit_diffusion.auxiliary_losses import ContrastiveFlow, Dispersive
from lit_diffusion.gaussian import expand_as
from lit_diffusion.losses import DenoisingLoss, HybridLoss, MinSNR, Simple, UncertaintyLoss
from lit_diffusion.networks.dit import DiT
from lit_diffusion.parameterizations import (
    FDM,
    ContrastCorrection,
    EDMPreconditioning,
    Epsilon,
    FlowVelocity,
    Sample,
    Velocity,
)
from lit_diffusion.processes import DiscreteVP, LinearBetas, LinearFlow
from lit_diffusion.protocols import Denoised, NoisedBatch
from lit_diffusion.solvers import Euler

PLAIN = [Epsilon(), Sample(), Velocity(), FlowVelocity(), EDMPreconditioning()]
EVERY = [*PLAIN, FDM(Velocity(), 0.002, 80.0)]
SHAPE = (5, 1, 8, 8)


def term_of(output, batch, **parts):
    """The term, and the module, of a network that has `output` for this batch."""
    loss = parts.pop("auxiliary_loss", ContrastiveFlow(0.1))
    module = tiny_diffusion(network=FixedOutput(output), auxiliary_loss=loss, **parts)
    module.per_sample_loss(batch.x0, None, batch.t, batch.noise)
    return loss.compute(module, batch), module


def noised_batch(module, num=5):
    t = module.times.quantile(torch.linspace(0.1, 0.9, num), module.process)
    x0, noise = PIX((num, 1, 8, 8), 1).float(), Z((num, 1, 8, 8), 2).float()
    return NoisedBatch(x0, None, t, noise, None, None)


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
@pytest.mark.parametrize("weighting", [Simple(), MinSNR()])
def test_it_is_minus_the_weighted_error_against_another_image_of_the_batch(
    parameterization, weighting
):
    """Here each image has one other, at the time of the image, and with the noise of the other."""
    parts = {"parameterization": parameterization, "loss": DenoisingLoss(weighting)}
    batch, output = noised_batch(tiny_diffusion(), 2), Z((2, 1, 8, 8), 3).float()
    term, module = term_of(output, batch, **parts)
    swapped = []
    for i, j in ((0, 1), (1, 0)):
        alpha, sigma = module.process.alpha_sigma(batch.t[i])
        target = parameterization.target(batch.x0[j], batch.noise[j], alpha, sigma)
        scale = parameterization.output_scale(alpha, sigma)
        weight = weighting.weight(alpha, sigma, scale, None)
        swapped.append(weight * (output[i] - target).square().mean())
    close(term.double(), -0.1 * sum(swapped).double() / 2, rtol=1e-5)


def terms(output, batch, num):
    """Of draws of the other images, where the target is x0."""
    _, module = term_of(output, batch, parameterization=Sample())
    for _ in range(num):
        module.per_sample_loss(batch.x0, None, batch.t, batch.noise)
        yield module.auxiliary_loss.compute(module, batch).item() / -0.1


def test_the_other_image_is_never_the_image_itself():
    x0 = torch.eye(64)[:5].view(SHAPE)
    batch = noised_batch(tiny_diffusion())._replace(x0=x0)
    for term in terms(x0, batch, 100):
        assert term == pytest.approx(2 / 64)  # instead of 0


def test_the_other_images_are_equally_likely():
    """If image j is 4**j in every pixel, the sum of the squares tells how often each was drawn."""
    x0 = 4.0 ** torch.arange(5).view(5, 1, 1, 1).expand(SHAPE)
    batch, counts = noised_batch(tiny_diffusion())._replace(x0=x0), torch.zeros(5)
    for term in terms(torch.zeros(SHAPE), batch, 300):
        counts += torch.tensor([round(5 * term) // 16**j % 16 for j in range(5)])
    assert counts.sum() == 5 * 300
    assert (counts - 300).abs().max() < 60


def test_the_loss_that_learns_the_variance_contrasts_the_output_alone():
    batch = noised_batch(tiny_diffusion())
    output = Z((5, 2, 8, 8), 3).float()
    parts = {"loss": HybridLoss(Simple()), "parameterization": Epsilon()}
    torch.manual_seed(1)
    term, _ = term_of(output, batch, **parts)
    torch.manual_seed(1)
    expected, _ = term_of(output[:, :1], batch, parameterization=Epsilon())
    assert torch.equal(term, expected)


# Gaussian data, for which the optimal network is affine in x_t

MEAN, STD, WEIGHT = 0.3, 0.4, 0.2


def best_output(x_t, alpha, sigma, parameterization, weight):
    """(E[target | x_t] - weight * E[target]) / (1 - weight), for x0 of N(MEAN, STD**2)."""
    x0 = MEAN + alpha * STD**2 / (alpha**2 * STD**2 + sigma**2) * (x_t - alpha * MEAN)
    target = parameterization.target(x0, (x_t - alpha * x0) / sigma, alpha, sigma)
    mean = parameterization.target(torch.full_like(x0, MEAN), 0 * x0, alpha, sigma)
    return (target - weight * mean) / (1 - weight)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x, noise_label, condition):
        return self.weights[0] + self.weights[1] * x


@pytest.mark.parametrize("parameterization", PLAIN, ids=repr)
def test_the_optimum_has_the_bias_of_the_formula(parameterization):
    """Newton's step on the quadratic loss finds the optimum of an affine network at one time."""
    torch.manual_seed(0)
    process, loss = DiscreteVP(LinearBetas(1000)), ContrastiveFlow(WEIGHT)
    module = tiny_diffusion(
        network=Affine(),
        process=process,
        parameterization=parameterization,
        auxiliary_loss=loss,
        image_shape=(1, 1, 1),
    ).double()
    n = 200_000
    x0 = MEAN + STD * torch.randn(n, 1, 1, 1).double()
    noise, t = torch.randn(n, 1, 1, 1).double(), torch.full((n,), 200.0).double()

    def total(weights):
        torch.manual_seed(1)
        call = {"network.weights": weights}
        return torch.func.functional_call(Total(module), call, (x0, t, noise))

    zero = torch.zeros(2).double()
    gradient = torch.func.grad(total)(zero)
    hessian = torch.autograd.functional.hessian(total, zero)
    weights = -torch.linalg.solve(hessian, gradient)
    alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(t[:1]))
    x_t = torch.tensor([-1.0, 0.0, 2.0]).double().view(3, 1, 1, 1)
    output = weights[0] + weights[1] * parameterization.network_input(x_t, alpha, sigma)
    expected = best_output(x_t, alpha, sigma, parameterization, WEIGHT)
    torch.testing.assert_close(output, expected, rtol=0, atol=0.01)
    unbiased = best_output(x_t, alpha, sigma, parameterization, 0.0)
    assert (output - unbiased).abs().max() > 0.1
    correction = ContrastCorrection(parameterization, WEIGHT, MEAN)
    torch.testing.assert_close(
        correction.to_x0(expected, x_t, alpha, sigma),
        parameterization.to_x0(unbiased, x_t, alpha, sigma),
    )


class Total(nn.Module):
    """The training loss with the auxiliary term."""

    def __init__(self, module):
        super().__init__()
        self.module, self.network = module, module.network

    def forward(self, x0, t, noise):
        losses = self.module.per_sample_loss(x0, None, t, noise)
        batch = NoisedBatch(x0, None, t, noise, None, None)
        return losses.mean() + self.module.auxiliary_loss.compute(self.module, batch)


@pytest.mark.parametrize("corrected", [False, True])
def test_samples_of_the_optimum_have_too_little_variance_unless_corrected(corrected):
    """The flow of velocity (E[u | x_t] - w E[u]) / (1 - w) has the std s**(1 / (1 - w))."""
    process, base = LinearFlow(), FlowVelocity()
    parameterization = ContrastCorrection(base, WEIGHT, MEAN) if corrected else base

    def denoise(x_t, t):
        alpha, sigma = (expand_as(v, x_t) for v in process.alpha_sigma(t))
        output = best_output(x_t, alpha, sigma, base, WEIGHT)
        x0 = parameterization.to_x0(output, x_t, alpha, sigma)
        return Denoised(x0, (x_t - alpha * x0) / sigma)

    noise = torch.tensor([-2.0, 0.0, 1.0]).double().view(3, 1, 1, 1)
    samples = Euler(1000).sample(denoise, process, noise, torch.randn_like)
    std = STD if corrected else STD ** (1 / (1 - WEIGHT))
    torch.testing.assert_close(samples, MEAN + std * noise, rtol=0, atol=3e-3)


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
def test_the_correction_removes_the_mean_image_in_each_pixel(parameterization):
    alpha, sigma = torch.tensor(0.8).double(), torch.tensor(0.6).double()
    x0, noise, mean = PIX((2, 3, 4, 4), 1), Z((2, 3, 4, 4), 2), PIX((3, 4, 4), 3)
    x_t = alpha * x0 + sigma * noise
    target = parameterization.target(x0, noise, alpha, sigma)
    mean_target = parameterization.target(mean, 0 * mean, alpha, sigma)
    output = (target - 0.05 * mean_target) / 0.95
    correction = ContrastCorrection(parameterization, 0.05, mean.tolist())
    close(correction.to_x0(output, x_t, alpha, sigma), x0, rtol=1e-9, atol=1e-9)
    assert torch.equal(correction.target(x0, noise, alpha, sigma), target)
    expected = parameterization.network_input(x_t, alpha, sigma)
    assert torch.equal(correction.network_input(x_t, alpha, sigma), expected)
    output.requires_grad_()
    estimate = correction.to_x0(output, x_t, alpha, sigma)
    (slope,) = torch.autograd.grad(estimate.sum(), output)
    close(slope.abs(), 0.95 * parameterization.output_scale(alpha, sigma).expand(2, 3, 4, 4))


@pytest.mark.parametrize("weight", [0.05, -0.05])
def test_the_correction_does_not_change_the_training_loss(weight):
    """Also where the weight of the loss depends on how x0 depends on the output."""
    losses = []
    for parameterization in (Velocity(), ContrastCorrection(Velocity(), weight)):
        loss = DenoisingLoss(MinSNR())
        module = tiny_diffusion(parameterization=parameterization, loss=loss).eval()
        losses.append(module.per_sample_loss(*noised_batch(module)[:4]))
    assert torch.equal(*losses)


# With the network


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_the_network_through_its_output(compiled):
    loss = ContrastiveFlow()
    network = DiT(8, 1, 1, depth=1, width=32, num_heads=2, num_classes=10)
    module = tiny_diffusion(network=network, num_classes=10, auxiliary_loss=loss)
    if compiled:
        network.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    batch = noised_batch(module)
    outputs = []
    module.network.train()
    run = module._run_network
    module._run_network = lambda *args: outputs.append(run(*args)) or outputs[-1]
    module.per_sample_loss(batch.x0, None, batch.t, batch.noise)
    assert torch.equal(loss.output._output, outputs[0][0])
    term = loss.compute(module, batch)
    (recorded,) = torch.autograd.grad(term, network.final_layer.linear.bias)
    assert recorded.abs().sum() > 0


@pytest.mark.parametrize("parameterization", EVERY, ids=repr)
def test_a_negative_weight_is_the_inverse_of_the_correction(parameterization):
    alpha, sigma = torch.tensor(0.8).double(), torch.tensor(0.6).double()
    target, x_t, mean = Z((2, 3, 4, 4), 1), Z((2, 3, 4, 4), 2), PIX((3, 4, 4), 3)
    mean_target = parameterization.target(mean, 0 * mean, alpha, sigma)
    biased = (target - 0.05 * mean_target) / 0.95
    bias = ContrastCorrection(parameterization, -0.05 / 0.95, mean.tolist())
    expected = parameterization.to_x0(biased, x_t, alpha, sigma)
    close(bias.to_x0(target, x_t, alpha, sigma), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1])
def test_the_weight_is_between_0_and_1(weight):
    with pytest.raises(ValueError, match=f"0 < weight < 1 must hold, got {weight}"):
        ContrastiveFlow(weight)


@pytest.mark.parametrize("weight", [0.0, 1.0, -torch.inf, torch.nan])
def test_the_weight_of_the_correction_is_below_1(weight):
    with pytest.raises(ValueError, match=f"weight must be below 1 and not 0, got {weight}"):
        ContrastCorrection(Velocity(), weight)


def test_weights_of_times_are_those_of_the_training_loss():
    """With the same target for all images, the term is the training loss times minus the weight."""
    x0, noise = (part[:1].expand(SHAPE) for part in (PIX(SHAPE, 1).float(), Z(SHAPE, 2).float()))
    u = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double()
    loss = ContrastiveFlow(0.1)
    module = tiny_diffusion(network=FixedOutput(Z(SHAPE, 3).float()), auxiliary_loss=loss)
    module.timestep_weight = torch.tensor([0.5, 1.0, 4.0])
    batch = NoisedBatch(x0, None, module.times.quantile(u, module.process), noise, u, None)
    losses = module.per_sample_loss(*batch[:4])
    expected = (losses * torch.tensor([0.5, 0.5, 1.0, 4.0, 4.0])).mean()
    torch.testing.assert_close(loss.compute(module, batch), -0.1 * expected)


def test_learned_weights_of_the_training_loss_are_refused():
    loss = UncertaintyLoss(Simple(), num_features=4)
    with pytest.raises(
        ValueError, match="learned weights of UncertaintyLoss; choose DenoisingLoss"
    ):
        term_of(Z(SHAPE, 3).float(), noised_batch(tiny_diffusion()), loss=loss)


def test_batches_of_one_image_are_refused():
    batch = noised_batch(tiny_diffusion(), 1)
    with pytest.raises(ValueError, match=r"at least 2 images per device, got 1; .* drop_last"):
        term_of(torch.zeros(1, 1, 8, 8), batch)


@pytest.mark.parametrize(
    ("weight", "loss", "message"),
    [
        (0.05, None, r"needs ContrastiveFlow\(weight=0.05\) in training, got auxiliary_loss=None;"),
        (0.05, Dispersive("enter"), "got auxiliary_loss=Dispersive with bias_weight=0.0"),
        (0.05, ContrastiveFlow(0.1), "got auxiliary_loss=ContrastiveFlow with bias_weight=0.1"),
        (-0.05, ContrastiveFlow(0.05), "needs no ContrastiveFlow in training"),
        (0.05, ContrastiveFlow(0.05), None),
        (-0.05, None, None),
    ],
)
def test_a_correction_without_the_bias_that_it_removes_is_not_trained(
    tmp_path, weight, loss, message
):
    """As where another arm replaces the loss, and only the correction remains."""
    correction = ContrastCorrection(Velocity(), weight)
    module = tiny_diffusion(parameterization=correction, auxiliary_loss=loss)
    trainer = make_trainer(tmp_path, max_steps=1)
    if message is None:
        trainer.fit(module, images(4, 4))
        return
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, images(4, 4))
    module.generate(range(1))  # a network that was trained elsewhere
