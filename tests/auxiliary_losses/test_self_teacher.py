"""The teacher of SRA: its weights against a plain average, its times, where it is the network."""

import pytest
import torch
from lightning.pytorch import Callback
from support.plain_module import make_trainer
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from torch import nn

from lit_diffusion.auxiliary_losses import RepresentationAlignment, SelfTeacher
from lit_diffusion.parameterizations import FlowVelocity
from lit_diffusion.processes import EDMProcess, LinearFlow
from lit_diffusion.protocols import NoisedBatch
from lit_diffusion.timesteps import LogNormal


def module_of(teacher, **changes):
    """A diffusion model whose projector is the identity."""
    loss = RepresentationAlignment("dropout", 8, teacher, hidden=(), distance="smooth_l1")
    nn.init.eye_(loss.projector[0].weight)
    nn.init.zeros_(loss.projector[0].bias)
    return tiny_diffusion(auxiliary_loss=loss, **changes)


def batch_of(module, n=6):
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, n, *module.image_shape, generator=generator)
    u = torch.rand(n, dtype=torch.float64, generator=generator)
    t = module.times.quantile(u, module.process)
    return NoisedBatch(x0, torch.arange(n) % 3, t, noise, u, None)


def term(module, batch, **for_teacher):
    module.per_sample_loss(*batch[:4])
    return module.auxiliary_loss.compute(module, batch._replace(**for_teacher))


def test_the_loss_is_0_if_block_time_weights_noise_and_label_are_the_same():
    network = TinyNetwork()
    network.dropout.p = 0.0
    module = module_of(SelfTeacher("dropout", max_interval=0.0), network=network)
    batch = batch_of(module)
    assert term(module, batch) == 0
    assert term(module, batch, u=batch.u / 2) > 0
    assert term(module, batch, noise=batch.noise.flip(0)) > 0
    assert term(module, batch, condition=batch.condition.flip(0)) > 0
    network.dropout.p = 0.5  # of the network alone
    assert term(module, batch) > 0


class Inputs(nn.Module):
    """A network whose block returns x, and that keeps its noise labels."""

    def __init__(self):
        super().__init__()
        self.block = nn.Identity()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x, noise_label, condition):
        self.noise_label = noise_label
        return self.block(x)


def teacher_inputs(max_interval, n=4000, **changes):
    """u of the network, x_t and noise labels of the teacher, and the batch."""
    teacher = SelfTeacher("block", max_interval=max_interval, width=8)
    loss = RepresentationAlignment("block", 1, teacher, hidden=())
    options = {"network": Inputs(), "image_shape": (1, 1, 1), "parameterization": FlowVelocity()}
    module = tiny_diffusion(auxiliary_loss=loss, **options, **changes)
    batch = batch_of(module, n)
    features = teacher.features(module, batch)
    return features.flatten().double(), teacher.network.noise_label, batch


def test_times_are_cleaner_by_a_uniform_interval_and_end_at_the_cleanest():
    x_t, noise_label, batch = teacher_inputs(0.2, process=LinearFlow(t_min=1e-5))
    t = noise_label.double() / 1000
    x0, noise = batch.x0.flatten().double(), batch.noise.flatten().double()
    torch.testing.assert_close(x_t, (1 - t) * x0 + t * noise, rtol=1e-4, atol=1e-5)
    far = batch.u > 0.2  # whose interval never ends at the cleanest time
    share = ((batch.u - t) / 0.2)[far].sort().values
    uniform = torch.linspace(0, 1, len(share), dtype=torch.float64)
    assert (share - uniform).abs().max() < 0.03  # Kolmogorov-Smirnov, at 1%
    assert t.min() == pytest.approx(1e-5, rel=1e-3)
    assert (t <= batch.t + 1e-6).all()


def test_times_of_a_discrete_process_are_steps():
    _, noise_label, batch = teacher_inputs(0.3, n=50)
    assert torch.equal(noise_label, noise_label.round())
    assert (noise_label <= batch.t).all()
    assert (noise_label < batch.t - 10).any()  # of 100 steps


def test_other_distributions_of_times_are_lowered_by_quantiles():
    parts = {"process": EDMProcess(), "times": LogNormal()}
    _, noise_label, batch = teacher_inputs(0.2, n=50, **parts)
    normal = torch.distributions.Normal(-1.2, 1.2)
    quantile = normal.cdf(4 * noise_label.double())  # c_noise = ln(sigma) / 4
    lowered = batch.u - quantile
    assert (lowered > -1e-6).all()
    assert (lowered < 0.2 + 1e-6).all()


class Record(Callback):
    """The weights of network and teacher before the first step, and after each batch."""

    def __init__(self):
        self.steps, self.networks, self.teachers = [], [], []

    def on_train_start(self, trainer, module):
        self.networks.append(weights(module.network))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.teachers.append(weights(module.auxiliary_loss.teacher.network))
        if trainer.global_step == len(self.networks):
            self.networks.append(weights(module.network))
        self.steps.append(trainer.global_step)


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def test_the_weights_are_averaged_once_after_each_optimizer_step(tmp_path):
    record = Record()
    module = module_of(SelfTeacher("enter", decay=0.9))
    nn.init.zeros_(module.network.leave.bias)  # after `attach`, as weights that are loaded
    options = {"max_steps": 4, "accumulate_grad_batches": 2}
    make_trainer(tmp_path, record, **options).fit(module, images(24, 3))
    average, expected = record.networks[0], []
    for step in range(4):
        if step > 0:
            average = 0.9 * average + 0.1 * record.networks[step]
        expected += 2 * [average]  # both batches of a step
    torch.testing.assert_close(torch.stack(record.teachers), torch.stack(expected))
    assert not torch.equal(record.networks[0], record.networks[1])


class RandomFeature(TinyNetwork):
    """Scales its input by a constant that differs in each new network."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x, noise_label, labels):
        return super().forward(self.scale * x, noise_label, labels)


def test_the_teacher_equals_a_network_whose_weights_and_buffers_were_loaded():
    network = RandomFeature()
    network.dropout.p = 0.0
    module = module_of(SelfTeacher("dropout", max_interval=0.0), network=network)
    network.load_state_dict(RandomFeature().state_dict())
    assert term(module, batch_of(module)) == 0


def test_the_teacher_has_no_gradient_and_keeps_the_mode_of_its_modules():
    module = module_of(SelfTeacher("enter"))
    module.train()
    term(module, batch_of(module)).backward()
    teacher = module.auxiliary_loss.teacher
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert all(m.training for m in teacher.modules())


def test_the_random_numbers_of_the_step_are_drawn_before_those_of_the_teacher():
    """So that runs with and without the loss see the same noise."""
    state = []
    for loss in (module_of(SelfTeacher("enter")).auxiliary_loss, None):
        module = tiny_diffusion(auxiliary_loss=loss, label_dropout=0.0)
        drawn = module.per_sample_loss
        module.per_sample_loss = lambda x0, c, t, noise, step, f=drawn: (
            state.append((t, noise)) or f(x0, c, t, noise, step)
        )
        trainer = make_trainer(".", max_steps=2)
        trainer.fit(module, images(12, 6))
    for (t, noise), (t_plain, noise_plain) in zip(state[:2], state[2:], strict=True):
        assert torch.equal(t, t_plain)
        assert torch.equal(noise, noise_plain)


def test_a_teacher_from_a_checkpoint_is_averaged_in_the_next_step_but_not_in_the_same():
    """As after a checkpoint in the middle of accumulated batches, and after one between steps."""
    network, teachers = TinyNetwork(), [SelfTeacher("enter", decay=0.5) for _ in range(2)]
    for teacher in teachers:
        teacher.attach(network)
    teachers[0]._average(network, 0)
    network.leave.bias.data += 1
    teachers[0]._average(network, 7)
    teachers[1].load_state_dict(teachers[0].state_dict())
    network.leave.bias.data += 1
    before = teachers[0].network.leave.bias.clone()
    torch.testing.assert_close(before, network.leave.bias - 1.5)
    teachers[1]._average(network, 7)
    assert torch.equal(teachers[1].network.leave.bias, before)
    teachers[1]._average(network, 8)
    torch.testing.assert_close(teachers[1].network.leave.bias, network.leave.bias - 0.75)
