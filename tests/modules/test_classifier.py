import math

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.golden import Z, close
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from support.toy import gaussian_denoiser, mixture_denoiser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.data.digits import Digits
from lit_diffusion.guidance import ClassifierScore
from lit_diffusion.modules.classifier import NoisyClassifier
from lit_diffusion.networks.unet import EncoderUNet
from lit_diffusion.processes import (
    VE,
    ContinuousVP,
    CosineBetas,
    DiscreteVP,
    EDMProcess,
    LinearFlow,
)
from lit_diffusion.timesteps import Uniform

PROCESS = DiscreteVP(CosineBetas(100))


class TwoModes(nn.Module):
    """log p(label | x_t) for one pixel, data of -1 (label 0) and 1 (label 1), both N(., 0.3^2)."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x, noise_label):
        alpha, sigma = PROCESS.alpha_sigma(noise_label)
        variance = (0.3 * alpha) ** 2 + sigma**2
        x = x.flatten(1)[:, 0]
        return torch.stack([-((x - m * alpha) ** 2) / (2 * variance) for m in (-1, 1)], dim=1)


class Recording(nn.Module):
    """Remembers its inputs; its logits are the first two pixels."""

    def forward(self, x, noise_label):
        self.x, self.noise_label = x, noise_label
        return x.flatten(1)[:, :2]


def module(network, shape=(1, 1, 1), classes=2, process=PROCESS):
    def optimizer(parameters):
        return torch.optim.Adam(parameters, lr=3e-3)

    return NoisyClassifier(
        network, process, Uniform(), optimizer, image_shape=shape, num_classes=classes
    )


def test_the_gradient_turns_the_score_of_all_into_that_of_a_class():
    """By Bayes' rule exactly: the denoiser of one mode follows."""
    classifier = module(TwoModes()).double()
    x, t = Z((6, 1, 1, 1), 1), torch.full((6,), 40.0, dtype=torch.float64)
    labels = torch.tensor([0, 1] * 3)
    guidance = ClassifierScore(classifier.gradient(), clip=False)
    # the network is told float32 levels, so its gradient is that of a slightly other time
    both = mixture_denoiser(PROCESS, mean=1.0, std=0.3)
    guided = guidance.guide(lambda labels: both, labels, PROCESS, None)(x, t)
    left, right = (gaussian_denoiser(PROCESS, mean, 0.3)(x, t).x0 for mean in (-1.0, 1.0))
    expected = torch.where(labels.view(-1, 1, 1, 1) == 1, right, left)
    close(guided.x0, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_scales_pulls_nowhere_without_a_label_and_leaves_no_trace():
    classifier = module(TwoModes()).double()
    x, level = Z((2, 1, 1, 1), 1), torch.tensor([30.0, 30.0])
    one = classifier.gradient()(x, level, torch.tensor([1, -1]))
    with torch.no_grad():
        three = classifier.gradient(3.0)(x, level, torch.tensor([1, -1]))
    close(three, 3 * one)
    assert one[0] != 0
    assert one[1] == 0
    assert classifier.network.unused.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize(
    "process", [PROCESS, ContinuousVP(), EDMProcess(), VE(0.01), LinearFlow()], ids=repr
)
def test_the_network_sees_inputs_of_unit_variance_on_every_process(process):
    network = Recording()
    classifier = module(network, (1, 8, 8), process=process)
    x0, noise = Z((2, 1, 8, 8), 1).float(), Z((2, 1, 8, 8), 2).float()
    for u in (0.0, 0.5, 1.0):
        t = process.from_unit(torch.tensor([u, u], dtype=torch.float64))
        logits = classifier.logits(x0, t, noise)
        alpha, sigma = (float(v[0]) for v in process.alpha_sigma(t))
        x_t = alpha * x0 + sigma * noise
        close(network.x, (x_t / math.hypot(alpha, sigma)).double(), rtol=1e-5, atol=1e-6)
        assert process not in (PROCESS, ContinuousVP()) or torch.equal(network.x, x_t)
        assert 0.7 < network.x.std() < 1.3
        close(network.noise_label.double(), process.noise_label(t), rtol=1e-6)
        gradient = classifier.gradient()(x_t, t, torch.tensor([0, 1]))
        leaf = x_t.clone().requires_grad_()
        log_probabilities = (leaf / math.hypot(alpha, sigma)).flatten(1)[:, :2].log_softmax(1)
        (log_probabilities[0, 0] + log_probabilities[1, 1]).backward()
        close(gradient, leaf.grad, rtol=1e-4, atol=1e-9)
    assert logits.shape == (2, 2)


def test_the_gradient_is_the_same_where_a_trainer_validates():
    network = EncoderUNet(8, 1, 10, 32, (1, 2), 1, (2,), head_channels=32)
    gradient = module(network, (1, 8, 8), 10).gradient()
    inputs = Z((2, 1, 8, 8), 1).float(), torch.tensor([3.0, 90.0]), torch.tensor([1, 7])
    with torch.inference_mode():
        within = gradient(*(part.clone() for part in inputs))
    assert within.any()
    assert torch.equal(within, gradient(*inputs))


def test_the_gradient_has_no_dropout():
    network = EncoderUNet(8, 1, 10, 32, (1, 2), 1, (2,), head_channels=32, dropout=0.5)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)  # some are initialized with 0
    gradient = module(network.train(), (1, 8, 8), 10).gradient()
    inputs = Z((2, 1, 8, 8), 1).float(), torch.tensor([3.0, 90.0]), torch.tensor([1, 7])
    assert torch.equal(gradient(*inputs), gradient(*inputs))
    assert network.training


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (-1, "the class of each image, got labels of -1"),
        (2, r"labels must be 0\.\.1 or -1, got .*2"),
    ],
)
def test_labels_that_are_no_class_are_explained(tmp_path, label, message):
    parts = torch.zeros(4, 1, 1, 2, dtype=torch.uint8), torch.full((4,), label), torch.arange(4)
    classifier, data = module(Recording(), (1, 1, 2)), DataLoader(TensorDataset(*parts))
    with pytest.raises(ValueError, match=message):
        classifier.training_step(next(iter(data)), 0)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).validate(classifier, data, verbose=False)


class AnyDevice(CPUAccelerator):
    def setup_device(self, device):
        pass


def test_mps_is_explained(tmp_path):
    strategy = SingleDeviceStrategy("mps", AnyDevice())
    for each in (module(TwoModes()), tiny_diffusion()):
        trainer = make_trainer(tmp_path, strategy=strategy, accelerator="auto")
        with pytest.raises(ValueError, match=r"MPS has no float64; use --trainer\.accelerator=cpu"):
            trainer.fit(each, images(4, 4))


@pytest.mark.slow
def test_digits_are_recognised_through_noise_and_every_fit_is_the_same(tmp_path):
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        network = EncoderUNet(
            8, 1, 10, 32, (1, 2), num_res_blocks=1, attention_downsample=(), head_channels=32
        )
        classifier = module(network, (1, 8, 8), 10)
        trainer = make_trainer(tmp_path, max_epochs=2)
        trainer.fit(classifier, Digits(batch_size=64))
        ends.append(trainer.callback_metrics["val/accuracy"].item())
    assert ends[0] == ends[1] > 0.3
