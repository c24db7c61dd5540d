import pytest
import torch
from support.plain_module import assert_same_bits, make_trainer
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import InformationDensity
from lit_diffusion.callbacks.information import entropy_rate, noise_errors
from lit_diffusion.callbacks.loss_resampler import LossHistory
from lit_diffusion.gaussian import expand_as
from lit_diffusion.losses import DenoisingLoss, HybridLoss, MinSNR, Simple
from lit_diffusion.parameterizations import Epsilon, FlowVelocity, Sample, Velocity
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, LinearFlow
from lit_diffusion.protocols import Prediction


class Parts:
    """What the callback reads of a module."""

    def __init__(self, process, parameterization, loss):
        self.process, self.parameterization, self.loss = process, parameterization, loss


@pytest.mark.parametrize("weighting", [Simple(), MinSNR()], ids=repr)
@pytest.mark.parametrize(
    "parameterization", [Epsilon(), Sample(), Velocity(), FlowVelocity()], ids=repr
)
@pytest.mark.parametrize("process", [ContinuousVP(), LinearFlow()], ids=repr)
def test_a_loss_says_the_error_of_the_noise(process, parameterization, weighting):
    parts = Parts(process, parameterization, DenoisingLoss(weighting))
    per_loss, log_snr = noise_errors(parts, 8)
    assert (log_snr.diff() < 0).all()
    torch.manual_seed(0)
    x0, noise, off = torch.randn(3, 8, 1, 2, 2, dtype=torch.float64)
    t = process.from_unit((torch.arange(8, dtype=torch.float64) + 0.5) / 8)
    alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(t))
    x_t, wrong = alpha * x0 + sigma * noise, noise + off
    output = parameterization.target((x_t - sigma * wrong) / alpha, wrong, alpha, sigma)
    prediction = Prediction(output, x0, x_t, noise, t, None)
    loss = parts.loss.per_sample(prediction, process, parameterization)["loss"]
    torch.testing.assert_close(loss * per_loss, off.square().mean((1, 2, 3)))


def test_the_rate_is_that_of_gaussian_data():
    """I(x0; x_t) = log(1 + s^2 SNR) / 2 for x0 ~ N(0, s^2), so differences of it at the edges."""
    process, s = ContinuousVP(), 0.5
    per_loss, log_snr = noise_errors(Parts(process, Epsilon(), DenoisingLoss(Simple())), 400)
    t = process.from_unit((torch.arange(400, dtype=torch.float64) + 0.5) / 400)
    alpha, sigma = process.alpha_sigma(t)
    mmse = (alpha * s) ** 2 / ((alpha * s) ** 2 + sigma**2)  # of the noise
    history = LossHistory((mmse / per_loss)[:, None], torch.ones(400, dtype=torch.int64))
    known = 0.5 * torch.log1p(s**2 * log_snr.exp())
    rate = entropy_rate(history, per_loss, log_snr)
    torch.testing.assert_close(rate[4:], -known.diff()[4:], rtol=2e-2, atol=1e-6)
    assert rate.sum().item() == pytest.approx((known[0] - known[-1]).item(), rel=0.05)


def test_times_follow_the_rate_once_every_bin_has_its_losses(tmp_path):
    callback = InformationDensity(num_bins=4, history=2, uniform_prob=0.2)
    module, seen = tiny_diffusion(), []
    step = module.training_step
    module.training_step = lambda *args: seen.append(module.timestep_density) or step(*args)
    make_trainer(tmp_path, callback, max_epochs=4).fit(module, images(16, 8))
    assert torch.equal(seen[0], torch.ones(4, dtype=torch.float64))
    last = seen[-1]
    assert last.sum().item() == pytest.approx(1)
    assert last.min() >= 0.05
    assert last.std() > 0
    again = InformationDensity(num_bins=4, history=2, uniform_prob=0.2)
    again.load_state_dict(callback.state_dict())
    assert_same_bits(again.state_dict(), callback.state_dict())
    assert module.timestep_density is None
    assert module.timestep_weight is None


def test_other_losses_are_refused_at_the_start(tmp_path):
    parts = Parts(DiscreteVP(CosineBetas(100)), Epsilon(), HybridLoss(Simple()))
    with pytest.raises(ValueError, match="needs a DiffusionModule with DenoisingLoss"):
        noise_errors(parts, 4)
