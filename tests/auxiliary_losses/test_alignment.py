"""The alignment loss against a plain loop, its gradients, its end, and a run that is resumed."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.commands import call
from support.plain_module import make_trainer
from support.resuming import Recipe, assert_undisturbed
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion
from torch import nn

from lit_diffusion.auxiliary_losses import RepresentationAlignment, SelfTeacher
from lit_diffusion.auxiliary_losses.features import feature_grid
from lit_diffusion.callbacks import EMA
from lit_diffusion.checkpoints.loading import load
from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.networks.uvit import UViT
from lit_diffusion.protocols import NoisedBatch

CONFIGS = Path(__file__).parents[2] / "configs"


class Targets:
    """A teacher that returns the same features every time, and counts the calls."""

    def __init__(self, target):
        self.target, self.width, self.calls = target, target.shape[-1], 0

    def attach(self, network, /):
        pass

    def features(self, module, batch, /):
        self.calls += 1
        return self.target


class At:
    """What the loss reads of a module."""

    def __init__(self, network, global_step=0):
        self.network, self.global_step = network, global_step


def aligned(features, target, step=0, **arguments):
    """The loss of a network that outputs `features` (B, D, h, w), and its loss of `target`."""
    network = nn.Sequential(nn.Identity())
    loss = RepresentationAlignment("0", features.shape[1], Targets(target), **arguments)
    loss.attach(network)
    network(features)
    return loss, loss.compute(At(network, step), None)


def projected(loss, features):
    return loss.projector(features.movedim(1, -1))


@pytest.mark.parametrize("distance", ["cosine", "smooth_l1"])
def test_it_is_the_mean_over_images_and_positions(distance):
    features, target = torch.randn(3, 5, 2, 4), torch.randn(3, 2, 4, 6)
    loss, value = aligned(features, target, hidden=(7,), distance=distance, weight=0.3)
    total = 0.0
    for h, y in zip(projected(loss, features).flatten(0, 2), target.flatten(0, 2), strict=True):
        if distance == "cosine":
            total += -(h @ y / h.norm() / y.norm()).item()
        else:
            errors = (h - y).abs().tolist()
            total += sum(e**2 / 0.1 if e < 0.05 else e - 0.025 for e in errors) / 6
    assert value.item() == pytest.approx(0.3 * total / 24, rel=1e-5)


def test_the_cosine_ignores_lengths_and_is_lowest_if_directions_agree():
    features = torch.randn(2, 4, 3, 3)
    loss, _ = aligned(features, torch.ones(2, 3, 3, 4), hidden=())
    target = projected(loss, features).detach()
    for factor, expected in ((5.0, -0.5), (-0.1, 0.5)):
        loss.teacher.target = factor * target
        loss.features._output = features
        torch.testing.assert_close(
            loss.compute(At(None), None), torch.tensor(expected), rtol=0, atol=1e-6
        )


def test_a_coarser_teacher_gets_the_mean_of_the_positions_that_it_covers():
    features, target = torch.randn(2, 4, 6, 6), torch.randn(2, 3, 3, 4)
    loss, value = aligned(features, target, hidden=(8,), distance="smooth_l1", weight=1.0)
    pooled = F.avg_pool2d(projected(loss, features).movedim(-1, 1), 2).movedim(1, -1)
    torch.testing.assert_close(value, F.smooth_l1_loss(pooled, target, beta=0.05))


def test_a_finer_teacher_gets_interpolated_features():
    """A map that is linear in its coordinates stays so, but at the border."""
    ramp = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 4)
    fine = ((torch.arange(8.0) + 0.5) / 2 - 0.5).view(1, 8, 1, 1).expand(1, 8, 8, 1)
    loss, _ = aligned(ramp, fine, hidden=(), distance="smooth_l1", weight=1.0)
    nn.init.ones_(loss.projector[0].weight)
    nn.init.zeros_(loss.projector[0].bias)
    inner = loss._mean_distance(ramp.movedim(1, -1), fine.clamp(0, 3))
    torch.testing.assert_close(inner, torch.zeros(()))


def dit(**changes):
    torch.manual_seed(0)
    arguments = {"depth": 3, "width": 32, "num_heads": 2, "num_classes": 3} | changes
    network = DiT(8, 1, 1, **arguments)
    for parameter in network.parameters():  # zero-initialised layers would hide everything
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return network


def sra(block="blocks.0", teacher="blocks.2", width=32, **arguments):
    torch.manual_seed(1)
    own = {n: arguments.pop(n) for n in ("decay", "max_interval") if n in arguments}
    defaults = {"hidden": (16,), "distance": "smooth_l1"}
    teacher = SelfTeacher(teacher, **({"decay": 0.5} | own))
    return RepresentationAlignment(block, width, teacher, **(defaults | arguments))


def sra_module(network=None, loss=None, **changes):
    network = dit() if network is None else network
    return tiny_diffusion(network=network, auxiliary_loss=loss or sra(), **changes)


def noised(n=4, size=8):
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, n, 1, size, size, generator=generator)
    u = torch.rand(n, dtype=torch.float64, generator=generator)
    return x0, noise, u


def term(module, condition=None):
    """The term of a batch, after the network has processed it."""
    x0, noise, u = noised(size=module.image_shape[-1])
    t = module.times.quantile(u, module.process)
    module.per_sample_loss(x0, condition, t, noise)
    batch = NoisedBatch(x0, condition, t, noise, u, None)
    return module.auxiliary_loss.compute(module, batch)


def test_gradients_reach_the_projector_and_what_comes_before_the_block_alone():
    module = sra_module(loss=sra("blocks.1"))
    term(module, torch.tensor([0, 1, 2, -1])).backward()
    with_gradient = {n for n, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    later = ("network.blocks.2", "network.final_layer", "auxiliary_loss.teacher")
    reached = {n for n, _ in module.named_parameters() if not n.startswith(later)}
    assert with_gradient == reached


def test_a_step_along_the_gradient_lowers_the_loss():
    module = sra_module(loss=sra(max_interval=0.0))
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    with torch.no_grad():  # the teacher is averaged in step 0, so it must not move afterwards
        before = term(module)
    module.auxiliary_loss.teacher._average = lambda *_: None
    term(module).backward()
    optimizer.step()
    assert term(module) < before


def test_after_until_step_the_loss_is_0_the_teacher_rests_and_ddp_gets_its_gradients():
    features, target = torch.randn(2, 4, 3, 3, requires_grad=True), torch.randn(2, 3, 3, 4)
    loss, value = aligned(features, target, step=4, until_step=5)
    assert loss.teacher.calls == 1
    assert value != 0
    loss, value = aligned(features, target, step=5, until_step=5)
    assert loss.teacher.calls == 0
    assert value == 0
    value.backward()
    assert features.grad is None
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in loss.projector.parameters())
    with pytest.raises(RuntimeError, match="has not run"):
        loss.features.take()  # the graph of the forward pass was released


def trained(module, folder, **options):
    trainer = make_trainer(folder, **{"max_steps": 3, **options})
    trainer.fit(module, images(24, 6))
    return module


def test_the_network_trains_on_as_without_the_loss_after_until_step(tmp_path):
    """Steps 2 and 3 of both runs start from the same weights and draw the same numbers."""
    runs = []
    for loss in (sra(until_step=1), None):
        with torch.random.fork_rng():
            plain = tiny_diffusion(network=dit(), auxiliary_loss=loss)
        # The term of step 1 is taken away, so that both runs end alike if it is 0 later.
        if loss is not None:
            compute = loss.compute
            loss.compute = lambda m, b, f=compute: f(m, b) * (0 if m.global_step == 0 else 1)
        runs.append(trained(plain, tmp_path).network.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[1])


SIZES = {"patch_size": 2, "width": 32, "depth": 4, "num_heads": 2, "num_classes": 3}
NETWORKS = {
    "DiT": (lambda: dit(), "blocks.0", "blocks.2", 32),
    "JiT": (
        lambda: JiT(8, 1, 1, **SIZES, bottleneck=8, in_context_tokens=2, in_context_start=1),
        "blocks.0",
        "blocks.2",
        32,
    ),
    "UViT": (lambda: UViT(8, 1, 1, **SIZES), "in_blocks.0", "out_blocks.0", 32),
    "UNet": (
        lambda: UNet(1, 1, 8, (1, 2), 1, (), norm_groups=2, num_classes=3),
        "input_blocks.1",
        "output_blocks.3",
        8,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_fits_every_network(name):
    """Also networks that put tokens of the condition before or after the patches."""
    build, block, teacher, width = NETWORKS[name]
    module = sra_module(build(), sra(block, teacher, width))
    value = term(module, torch.tensor([0, 1, 2, -1]))
    assert value > 0
    value.backward()
    assert module.auxiliary_loss.projector[0].weight.grad.any()


def test_patches_are_told_from_other_tokens():
    """UViT puts tokens of time and label before those of the 8 x 8 patches."""
    network = UViT(8, 1, 1, **SIZES | {"patch_size": 1})
    output = torch.arange(network.num_prefix + 64.0).view(1, -1, 1)
    expected = network.num_prefix + torch.arange(64.0)
    assert torch.equal(feature_grid(output, network).flatten(), expected)
    assert torch.equal(feature_grid(output[:, :16], nn.Identity()).flatten(), torch.arange(16.0))
    with pytest.raises(ValueError, match="each of the 8 x 8 patches, got 30 tokens; choose"):
        feature_grid(output[:, : network.num_prefix + 30], network)
    with pytest.raises(ValueError, match="each of the 5 x 5 patches, got 26"):
        feature_grid(torch.zeros(1, 26, 2), nn.Identity())


@pytest.mark.slow
def test_the_loss_of_a_compiled_network_is_that_of_the_network():
    values = []
    for compiled in (False, True):
        module = sra_module()
        if compiled:
            module.network.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        torch.manual_seed(2)
        value = term(module)
        value.backward()
        values.append((value.detach(), module.network.x_embedder.proj.weight.grad))
    torch.testing.assert_close(values[1], values[0])


def test_the_teacher_stops_in_networks_with_gradient_checkpointing_too():
    values = []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(3)
        module = sra_module(dit(gradient_checkpointing=gradient_checkpointing))
        torch.manual_seed(2)
        value = term(module)
        value.backward()
        values.append((value.detach(), module.network.x_embedder.proj.weight.grad))
    torch.testing.assert_close(values[1], values[0])


def test_in_mixed_precision_the_distance_is_in_float32(tmp_path):
    module = sra_module()
    values = []
    compute = module.auxiliary_loss.compute
    module.auxiliary_loss.compute = lambda *args: values.append(compute(*args)) or values[-1]
    before = module.auxiliary_loss.projector[0].weight.detach().clone()
    trained(module, tmp_path, precision="bf16-mixed")
    assert all(value.dtype == torch.float32 and value.isfinite() for value in values)
    assert not torch.equal(module.auxiliary_loss.projector[0].weight, before)


# Runs


def dit_with_dropped_labels():
    return sra_module(loss=sra(until_step=9), num_classes=10, network=dit(num_classes=10))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch", [2, 5])
def test_a_resumed_run_has_the_same_bits(tmp_path, accumulate, batch):
    trainer = (("accumulate_grad_batches", accumulate),)
    recipe = Recipe(("EMA",), trainer=trainer, module=dit_with_dropped_labels)
    assert_undisturbed(tmp_path, recipe, batch)


def two_ranks(folder):
    """The weights of each rank after two steps with the term and two without."""
    module = sra_module(loss=sra(until_step=2))
    trained(module, folder, devices=2, strategy="ddp", max_steps=4, max_epochs=-1)
    return {name: value.tolist() for name, value in module.state_dict().items()}


@pytest.mark.slow
def test_two_ranks_have_the_same_network_and_teacher_also_after_the_term(tmp_path):
    first, second = spawn(two_ranks, 2, tmp_path)
    assert first == second


def saved(tmp_path, loss):
    module = sra_module(loss=loss)
    ema = EMA((0.9,))
    trainer = make_trainer(tmp_path, ema, max_steps=2)
    trainer.fit(module, images(12, 6))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    return module, ema


def test_its_state_is_in_the_checkpoint_and_the_teacher_is_not_averaged_again(tmp_path):
    module, ema = saved(tmp_path, sra())
    averaged = ema.state_dict()["shadows"][0]
    assert {n for n in averaged if "teacher" in n} == set()
    assert {n for n in averaged if "projector" in n} != set()
    fresh = sra_module()
    loaded = load(tmp_path / "run.ckpt", "raw", module=fresh)
    state = module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert int(state["auxiliary_loss.teacher._extra_state"]) == 1
    assert torch.equal(loaded.generate([0, 1]), module.eval().generate([0, 1]))


@pytest.mark.slow
def test_the_arms_dit_and_sra_train_and_export_a_network(folder):
    arms = " ".join(f"--config {CONFIGS}/arms/digits/{arm}.yaml" for arm in ("dit", "sra"))
    run = (
        "--trainer.max_steps=3 --trainer.callbacks.FIDEvaluation=null --trainer.limit_val_batches=1"
    )
    run += " --trainer.callbacks.SampleGrid=null --trainer.default_root_dir=run"
    run += " --trainer.log_every_n_steps=1"
    assert call(f"fit --config {CONFIGS}/digits-ablation.yaml {arms} {run}") == 0
    rows = [row for row in read_rows(folder / "run" / "metrics.csv") if row.get("train/loss")]
    assert all(float(row["train/auxiliary_loss"]) > 0 for row in rows)
    assert len(rows) == 3
    assert call("convert export --checkpoint run --out exported --no_comparison") == 0
    assert torch.equal(load("run").generate([0, 1]), load("exported").generate([0, 1]))


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": 0.0}, "weight must be above 0"),
        ({"width": 0}, "width must be above 0"),
        ({"hidden": (8, 0)}, "hidden must be above 0"),
        ({"until_step": 0}, "until_step must be above 0"),
        ({"distance": "l2"}, "distance must be 'cosine' or 'smooth_l1', got 'l2'"),
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"max_interval": 1.5}, r"max_interval must be in \[0, 1\], got 1.5"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sra(**arguments)


def test_a_wrong_width_is_named_with_the_right_one():
    with pytest.raises(ValueError, match=r"'blocks.0', which is 32, got 16; pass width=32"):
        term(sra_module(loss=sra(width=16)))


@pytest.mark.parametrize(("block", "teacher"), [("blocks.7", "blocks.1"), ("blocks.1", "blocks.7")])
def test_blocks_that_do_not_exist_are_named(block, teacher):
    with pytest.raises(ValueError, match=r"DiT has no block 'blocks.7'; it has"):
        sra_module(loss=sra(block, teacher))
