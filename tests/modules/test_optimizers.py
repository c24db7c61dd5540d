from copy import deepcopy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from support.saving import fit, saved
from support.tiny_run import TinyData, TinyModule, TinyNet
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, RMSprop

from lit_diffusion.callbacks import EMA, MomentumDecay
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.modules.optimizers import optimizer_and_schedule, with_fused_kernels


class OwnAdam(Adam):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "devices", "dtype", "fused"),
    [
        (Adam, {}, ["cuda", "cuda"], torch.float32, True),
        (SGD, {"momentum": 0.9}, ["cuda"], torch.float64, True),
        (Adam, {}, ["cpu"], torch.float32, None),
        (Adam, {}, ["cuda", "cpu"], torch.float32, None),
        (Adam, {}, ["cuda"], torch.complex64, None),
        (Adam, {"fused": False}, ["cuda"], torch.float32, False),
        (Adam, {"differentiable": True}, ["cuda"], torch.float32, None),
        (OwnAdam, {}, ["cuda"], torch.float32, None),
        (RMSprop, {}, ["cuda"], torch.float32, None),
    ],
)
def test_torchs_optimizers_are_fused_on_a_gpu_unless_the_user_chose(
    kind, options, devices, dtype, fused
):
    with FakeTensorMode():
        params = [nn.Parameter(torch.zeros(2, device=d, dtype=dtype)) for d in devices]
        optimizer = with_fused_kernels(kind(params, lr=0.1, **options))
        added = {"params": [nn.Parameter(torch.zeros(2, device=devices[0], dtype=dtype))]}
        optimizer.add_param_group(added)  # by a callback that unfreezes weights
    assert [group.get("fused") for group in optimizer.param_groups] == [fused, fused]


def trained(kind, state=None, steps=3, **options):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = with_fused_kernels(kind(net.parameters(), lr=0.1, **options))
    if state is not None:
        net.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return net.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("kind", [Adam, AdamW, partial(SGD, momentum=0.9)])
@pytest.mark.parametrize(("before", "after"), [(None, True), (True, None), (False, True)])
def test_a_resume_keeps_its_own_implementation_and_the_saved_state(kind, before, after):
    """A checkpoint from before fused kernels, or from another device, does not undo the choice."""
    state = deepcopy(trained(kind, fused=before))
    unchanged = deepcopy(state)
    weights, optimizer = trained(kind, state, fused=after)
    assert optimizer["param_groups"][0]["fused"] is after
    assert state[1]["param_groups"] == unchanged[1]["param_groups"]
    whole, _ = trained(kind, steps=6, fused=after)
    torch.testing.assert_close(weights, whole, rtol=1e-6, atol=1e-7)


def fused_by_default(params):
    """What `with_fused_kernels` makes of Adam on a GPU."""
    optimizer = with_fused_kernels(Adam(params, lr=0.1, betas=(0.8, 0.9)))
    optimizer.param_groups[0]["fused"] = True
    return optimizer


def run(folder, steps, resume=False):
    torch.manual_seed(0)
    callbacks = [EMA(0.5), MomentumDecay(total_steps=8)]
    fit(
        LastCheckpoint(folder),
        folder,
        folder / "last.ckpt" if resume else None,
        callbacks,
        TinyModule(TinyNet(3), fused_by_default),
        max_steps=steps,
        precision="bf16-mixed",
        gradient_clip_val=0.1,
    )
    return saved(folder)


def test_a_fused_fit_clips_in_mixed_precision_and_resumes_to_the_bit(tmp_path):
    """Lightning refuses to clip beside `Adam(fused=True)`, even in bf16-mixed."""
    whole = run(tmp_path / "whole", 8)
    run(tmp_path, 5)
    resumed = run(tmp_path, 8, resume=True)
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)
    assert whole["optimizer_states"][0]["param_groups"][0]["fused"] is True


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_fit_on_a_gpu_is_fused_clips_and_goes_on_from_the_cpu(tmp_path, precision):
    def adam(params):
        return with_fused_kernels(Adam(params, lr=0.1))

    def on_gpu(steps, resume=None):
        trainer = pl.Trainer(
            callbacks=[LastCheckpoint(tmp_path / "gpu"), EMA(0.5)],
            accelerator="gpu",
            devices=1,
            logger=False,
            max_steps=steps,
            precision=precision,
            gradient_clip_val=0.1,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(TinyModule(TinyNet(3), adam), TinyData(), ckpt_path=resume)
        (group,) = trainer.optimizers[0].param_groups
        counts = [state["step"] for state in trainer.optimizers[0].state.values()]
        assert group["fused"] is True
        assert all(count.is_cuda for count in counts)
        skipped = 0 if precision != "16-mixed" else steps  # at most, while the scale is found
        assert all(steps - skipped <= count <= steps for count in counts)

    fit(LastCheckpoint(tmp_path), tmp_path, None, [EMA(0.5)], TinyModule(TinyNet(3), adam))
    on_gpu(15, tmp_path / "last.ckpt")
    resumed = TinyModule(TinyNet(3), adam)  # and back to the CPU
    folder = tmp_path / "gpu"
    fit(LastCheckpoint(folder), folder, folder / "last.ckpt", [EMA(0.5)], resumed, max_steps=18)
    assert saved(folder)["optimizer_states"][0]["param_groups"][0]["fused"] is None


class Normalized(nn.Linear):
    calls = 0

    def normalize_weights(self):
        self.calls += 1
        self.last = self.weight.detach().clone()


def test_networks_that_normalize_their_weights_do_so_after_every_step_and_others_have_no_hook():
    network = nn.Sequential(Normalized(2, 2), nn.Sequential(Normalized(2, 1)))
    optimizer = optimizer_and_schedule(network, partial(SGD, lr=0.1), None, None)
    for step in range(3):
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for part in (network[0], network[1][0]):
            assert part.calls == step + 1
            assert torch.equal(part.last, part.weight)
    plain = optimizer_and_schedule(nn.Linear(2, 2), partial(SGD, lr=0.1), None, None)
    assert not plain._optimizer_step_post_hooks


def test_a_schedule_that_needs_a_metric_is_refused():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau needs a metric; use .* WarmupCosine"):
        optimizer_and_schedule(nn.Linear(2, 1), Adam, plateau, lambda: 10)
