import itertools
import math
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.memory_logger import MemoryLogger
from support.plain_module import PlainModule, make_trainer
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import GradientDiagnostics
from lit_diffusion.callbacks.gradient_diagnostics import random_halves, signal_and_noise
from lit_diffusion.seeding import PerSampleNoise


def test_signal_and_noise_are_unbiased():
    """Both are quadratic, so all signs of the errors have the mean of any errors of that size."""
    mean, sd, size = torch.tensor([0.3, -0.1, 0.2]).double(), 0.5, 8
    signs = torch.tensor([*itertools.product([-1.0, 1.0], repeat=6)]).double().view(-1, 2, 3)
    halves = mean + sd / math.sqrt(size) * signs
    estimates = torch.tensor([signal_and_noise(a, b, size) for a, b in halves]).double()
    expected = torch.tensor([mean.square().sum().item(), 3 * sd**2]).double()
    torch.testing.assert_close(estimates.mean(0), expected, rtol=1e-6, atol=0)


def test_halves_of_a_set_that_is_sorted_have_all_classes():
    """Places in order, or every second one, have not: of sorted classes, or of classes in turn."""
    for sorted_by in (lambda i: i // 8, lambda i: i % 4):
        first, second = ([sorted_by(i) for i in half.tolist()] for half in random_halves(32))
        assert set(first) == set(second) == set(range(4))
    assert sorted(random_halves(8).flatten().tolist()) == list(range(8))
    assert random_halves(9).shape == (2, 4)


def fitted(folder, *callbacks, module=None, **options):
    memory = MemoryLogger()
    trainer = make_trainer(folder, *callbacks, max_epochs=2, logger=memory, **options)
    module = module or tiny_diffusion()
    trainer.fit(module, images(16, 4))
    return module, memory


def by_autograd(module, u):
    """(P,) gradient of each half of every second training image at a level, loss by loss."""
    pixels, labels, index = images(16, 4).dataset[::2]
    x0 = module.codec.encode(pixels)
    noise = PerSampleNoise(index.tolist(), stream="noise level").randn_like(x0)
    t = module.process.from_unit(torch.full((8,), u).double())
    parameters = [p for p in module.parameters() if p.requires_grad]
    condition = labels if module.num_classes else None
    losses = module.per_sample_loss(x0, condition, t, noise)
    halves = []
    for half in (losses[i] for i in random_halves(8)):
        gradients = [torch.autograd.grad(each, parameters, retain_graph=True) for each in half]
        halves.append(sum(torch.cat([g.flatten() for g in each]) for each in gradients) / 4)
    return halves


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_is_logged_is_what_autograd_gives_at_each_level(tmp_path, precision):
    """Also where float16 would underflow, because nothing scales the loss."""
    callback = GradientDiagnostics(every_n_steps=8, num_levels=2, num_images=8)
    options = {}
    if precision == "16-mixed":
        options["plugins"] = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))
    module, memory = fitted(tmp_path, callback, **options)
    step, metrics = memory.rows_with("grad/update_ratio")[-1]
    assert step == 7
    assert set(metrics) == set(callback.metric_names())
    halves = {u: by_autograd(module.eval(), u) for u in (0.25, 0.75)}
    means = {u: (a + b) / 2 for u, (a, b) in halves.items()}
    for u, (a, b) in halves.items():
        assert metrics[f"grad/norm_u{u}"] == pytest.approx(means[u].norm().item(), rel=1e-5)
        signal, noise = signal_and_noise(a, b, 4)
        expected = noise / signal if signal > 0 else math.inf
        assert metrics[f"grad/noise_scale_u{u}"] == pytest.approx(expected, rel=1e-3)
    cosine = torch.cosine_similarity(means[0.25], means[0.75], dim=0).item()
    assert metrics["grad/cosine_u0.25_u0.75"] == pytest.approx(cosine, abs=1e-5)


def test_a_step_of_known_length_has_that_ratio(tmp_path):
    sgd = partial(torch.optim.SGD, lr=0.0)
    callback = GradientDiagnostics(every_n_steps=4, num_levels=1)
    _, memory = fitted(tmp_path, callback, module=tiny_diffusion(optimizer=sgd))
    assert [row["grad/update_ratio"] for _, row in memory.rows_with("grad/update_ratio")] == [0, 0]
    module = tiny_diffusion(optimizer=partial(torch.optim.SGD, lr=1e-6, weight_decay=1e3))
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1e4)  # decay outweighs any gradient
    _, memory = fitted(tmp_path, GradientDiagnostics(8, num_levels=1), module=module)
    ratio = memory.rows_with("grad/update_ratio")[-1][1]["grad/update_ratio"]
    assert ratio == pytest.approx(1e-3, rel=1e-2)


def test_bad_numbers_and_modules_are_refused(tmp_path):
    for options in ({"num_levels": 0}, {"num_images": 7}, {"num_images": 0}):
        with pytest.raises(ValueError, match="num_images even"):
            GradientDiagnostics(**options)
    with pytest.raises(TypeError, match="lacks per_sample_loss, process, codec"):
        make_trainer(tmp_path, GradientDiagnostics()).fit(PlainModule(), images(16, 4))
