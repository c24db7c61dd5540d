"""MuonAdamW against torch's two optimizers, laws of orthogonalized updates, and fits with it."""

from copy import deepcopy
from functools import partial
from io import BytesIO

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from support.plain_module import assert_same_bits, loader, make_trainer, trainable
from support.recorded import Recorded
from support.resuming import TRAINER_SETTINGS, Recipe, assert_undisturbed, small_unet
from support.small_networks import NETWORKS, arguments, small
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion
from torch import nn
from torch.optim import AdamW, Muon, lr_scheduler

from lit_diffusion.callbacks import EMA, FiniteUpdates, LRCompensation, MomentumDecay
from lit_diffusion.callbacks.momentum_decay import momentum_decay
from lit_diffusion.networks.layers import Patched
from lit_diffusion.optimizers import MuonAdamW, hidden_matrices


def draw_gradients(network, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in network.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def attached(network, **arguments):
    optimizer = MuonAdamW(network.parameters(), **arguments)
    optimizer.attach(network)
    return optimizer


class Matrix(nn.Module):
    """A network whose only block is a matrix."""

    block_names = ("block",)

    def __init__(self, rows, columns):
        super().__init__()
        self.block = nn.Linear(columns, rows, bias=False)

    def update(self, gradient, **arguments):
        """What a step of lr 1 subtracts from the matrix 0."""
        nn.init.zeros_(self.block.weight)
        self.block.weight.grad = gradient.clone()
        attached(self, lr=1.0, **arguments).step()
        return -self.block.weight.detach()


# Which weights


ADAMW = {
    "unet": {"time_embed.0", "time_embed.2", "label_emb", "input_blocks.0.0", "out.2"},
    "dit": {
        *("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear"),
        *("y_embedder.embedding_table", "final_layer.adaLN_modulation.1"),
    },
    "jit": {
        *("in_context", "patch_embed.0", "patch_embed.1", "time_embed.0", "time_embed.2"),
        *("condition", "final_layer.linear", "final_layer.adaLN_modulation.1"),
    },
    "uvit": {"pos_embed", "label_emb", "patch_embed.proj", "decoder_pred", "final_layer"},
}
"""Weights of two and more dimensions that Muon does not update."""


@pytest.mark.parametrize("name", NETWORKS)
def test_muon_updates_matrices_but_those_of_the_first_and_last_layer_and_of_embeddings(name):
    network = NETWORKS[name](**arguments(name))
    muon, adamw = (group["params"] for group in attached(network).param_groups)
    names = {param: key.removesuffix(".weight") for key, param in network.named_parameters()}
    assert {names[param] for param in adamw if param.ndim > 1} == ADAMW[name]
    assert {param.ndim for param in muon} <= {2, 3, 4}
    assert names.keys() == {*muon, *adamw}
    assert len(names) == len(muon) + len(adamw)


def test_the_first_matrix_is_hidden_even_if_it_is_as_wide_as_the_images_have_channels():
    narrow, wide = (small("dit", in_channels=channels) for channels in (1, 32))
    assert len(hidden_matrices(wide)) == len(hidden_matrices(narrow))
    assert wide.blocks[0].attn.qkv.weight.shape[1] == wide.in_channels


def test_networks_inside_of_others_and_frozen_weights():
    network = NETWORKS["unet"](**arguments("unet", in_channels=4, out_channels=4))
    network.middle_block.requires_grad_(False)
    wrapped = Patched(network)
    optimizer = MuonAdamW(param for param in wrapped.parameters() if param.requires_grad)
    optimizer.attach(wrapped)
    inside = {*hidden_matrices(network)} - {*network.middle_block.parameters()}
    assert {*optimizer.param_groups[0]["params"]} == inside
    assert network.input_blocks[0][0].weight not in inside


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="Linear has none in its blocks; list the blocks in an"):
        attached(nn.Linear(2, 2))
    optimizer = MuonAdamW(Matrix(2, 2).parameters())
    with pytest.raises(RuntimeError, match=r"does not know the hidden layers; call attach\("):
        optimizer.step()


# The update


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_steps_equal_those_of_torchs_optimizers_on_reshaped_copies_to_the_bit(memory_format, scale):
    network = small("unet").to(memory_format=memory_format)
    options = {"weight_decay": 0.1, "lr": 0.02}
    betas = 0.8, 0.99
    both = {"momentum": 0.9, "adjust_lr_fn": scale}
    ours = attached(network, **options, **both, adamw_lr=1e-3, betas=betas)
    groups = [[p.detach().clone() for p in group["params"]] for group in ours.param_groups]
    groups[0] = [matrix.flatten(1) for matrix in groups[0]]
    hand = (
        Muon(groups[0], **options, **both),
        AdamW(groups[1], **{**options, "lr": 1e-3}, betas=betas),
    )
    for step in range(3):
        draw_gradients(network, step)
        for group, copies in zip(ours.param_groups, groups, strict=True):
            for param, copy in zip(group["params"], copies, strict=True):
                copy.grad = param.grad.reshape(copy.shape)
        for optimizer in (ours, *hand):
            optimizer.step()
    for group, copies, optimizer in zip(ours.param_groups, groups, hand, strict=True):
        for param, copy in zip(group["params"], copies, strict=True):
            assert torch.equal(param.reshape(copy.shape), copy)
            assert_same_bits(ours.state[param], optimizer.state[copy])


def test_memory_formats_have_the_same_update_to_the_bit():
    networks = [small("unet"), small("unet").to(memory_format=torch.channels_last)]
    for network in networks:
        optimizer = attached(network)
        for step in range(2):
            draw_gradients(network, step)
            optimizer.step()
    assert not networks[1].middle_block[0].in_layers[2].weight.is_contiguous()
    assert_same_bits(networks[1].state_dict(), networks[0].state_dict())


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_updates_have_singular_values_near_1_and_the_size_of_adamws(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    orthogonal = Matrix(*shape).update(gradient, adjust_lr_fn="original")
    values = torch.linalg.svdvals(orthogonal) / max(1, shape[0] / shape[1]) ** 0.5
    assert 0.6 < values.min() < values.max() < 1.3  # torch says 0.5 to 1.5
    size = Matrix(*shape).update(gradient).square().mean().sqrt()
    assert 0.17 < size < 0.23


def test_updates_turn_with_the_gradient_and_do_not_grow_with_it():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(12, 20, generator=generator)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator)).Q for n in (12, 20))
    update = Matrix(12, 20).update(gradient)
    turned = Matrix(12, 20).update(left @ gradient @ right)
    error = (turned - left @ update @ right).norm() / update.norm()
    assert error < 0.03  # of bfloat16
    assert (turned - update).norm() / update.norm() > 1
    assert torch.equal(Matrix(12, 20).update(1024 * gradient), update)


# State


def trained(network, optimizer, steps):
    for step in steps:
        draw_gradients(network, step)
        optimizer.step()


def test_a_round_trip_of_the_state_changes_no_bit_also_into_another_memory_format():
    network = small("unet")
    optimizer = attached(network)
    trained(network, optimizer, range(2))
    file = BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "network": network.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = small("unet").to(memory_format=torch.channels_last)
    resumed.load_state_dict(saved["network"])
    other = attached(resumed, lr=7.0)
    other.load_state_dict(saved["optimizer"])
    trained(network, optimizer, range(2, 5))
    trained(resumed, other, range(2, 5))
    assert_same_bits(resumed.state_dict(), network.state_dict())
    assert_same_bits(other.state_dict(), optimizer.state_dict())


def test_weights_without_a_gradient_do_not_move_and_later_ones_are_adamws():
    network = small("unet")
    optimizer = attached(network, weight_decay=0.1)
    late = nn.Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    before = deepcopy(network.state_dict())
    late.grad = torch.ones(3, 3)
    optimizer.step()
    assert_same_bits(network.state_dict(), before)
    assert {*optimizer.state[late]} == {"step", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(late.detach(), torch.full((3, 3), 1 - 0.5 * 0.1 - 0.5))


# In a fit


class Plain(Recorded):
    """A foreign module whose first layer is its body."""

    def make_optimizer(self, params):
        self.inner.block_names = ("0",)
        optimizer = super().make_optimizer(params)
        optimizer.attach(self)
        return optimizer


HALVES = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
OPTIONS = partial(MuonAdamW, adamw_lr=0.1, betas=(0.8, 0.99), momentum=0.9)


@pytest.mark.parametrize("schedule", [HALVES, None])
@pytest.mark.parametrize("callback", [None, MomentumDecay(), LRCompensation(beta0=0.8)])
def test_schedules_and_momentum_decay_change_both_groups(tmp_path, schedule, callback):
    module = Plain(OPTIONS, schedule)
    callbacks = [] if callback is None else [callback]
    make_trainer(tmp_path, *callbacks).fit(module, loader())
    for step, groups in module.used:
        for (lr, beta1), base, beta0 in zip(groups, (1e-2, 0.1), (0.9, 0.8), strict=True):
            lr /= base * (1 if schedule is None else 0.5**step)
            start = 0.8 if isinstance(callback, LRCompensation) else beta0
            decayed = momentum_decay(step, 4, start)
            assert lr == pytest.approx(1 if callback is None else decayed.lr_factor, rel=1e-12)
            assert beta1 == (decayed.beta1 if type(callback) is MomentumDecay else beta0)
    assert len(module.used) == 4


def test_demon_leaves_the_lr(tmp_path):
    module = Plain(OPTIONS)
    make_trainer(tmp_path, MomentumDecay(compensate_lr=False)).fit(module, loader())
    assert {tuple(lr for lr, _ in groups) for _, groups in module.used} == {(1e-2, 0.1)}


@pytest.mark.parametrize("scaled", [False, True])
def test_skipped_updates_change_neither_weights_nor_state(tmp_path, scaled):
    class Spoilt(Plain):
        def on_before_optimizer_step(self, optimizer):
            state = [deepcopy(trainable(self)), deepcopy(optimizer.state_dict()["state"])]
            self.states = [*getattr(self, "states", []), state]

        def on_fit_start(self):
            spoil = lambda grad: grad * torch.inf if self.global_step == 1 else grad  # noqa: E731
            self.inner[0].weight.register_hook(spoil)

    module, guard = Spoilt(OPTIONS), FiniteUpdates(max_nonfinite_steps=1)
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    options = {"plugins": [scaler]} if scaled else {}
    make_trainer(tmp_path, guard, EMA((0.9,)), **options).fit(module, loader())
    first, before, after, last = module.states
    assert_same_bits(after, before)
    assert guard.skipped_updates == (0 if scaled else 1)  # the scaler has skipped it
    for states in ((first, before), (after, last)):
        assert not torch.equal(states[0][0]["inner.0.weight"], states[1][0]["inner.0.weight"])


def muon_unet():
    module = small_unet()
    module._make_optimizer = lambda parameters: MuonAdamW(parameters, lr=1e-3)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("settings", TRAINER_SETTINGS)
def test_a_run_that_died_resumes_to_the_bit(tmp_path, settings):
    recipe = Recipe(("EMA", "MomentumDecay"), trainer=settings, module=muon_unet)
    assert_undisturbed(tmp_path, recipe, 7)


def on_two_ranks(folder):
    """Weights after a fit with DDP, and the error of FSDP2."""

    def fit(strategy):
        network = NETWORKS["unet"](**arguments("unet", num_classes=3, out_channels=1))
        module = tiny_diffusion(network=network, optimizer=lambda p: MuonAdamW(p, lr=1e-3))
        trainer = make_trainer(folder, devices=2, strategy=strategy, max_steps=2)
        trainer.fit(module, images(32, 4))
        return trainable(module)

    try:
        fit(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    except ValueError as error:
        return str(error), fit("ddp")


@pytest.mark.slow
def test_ranks_of_ddp_have_the_same_weights_and_split_weights_are_refused(tmp_path):
    (message, weights), (_, others) = spawn(on_two_ranks, 2, tmp_path)
    assert message.startswith("MuonAdamW needs whole matrices, but they are split over ranks; use")
    assert_same_bits(weights, others)
