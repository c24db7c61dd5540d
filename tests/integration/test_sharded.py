"""Weights that fully_shard splits over ranks, unevenly, beside the same on one process.

On one process the same fit has whole weights: every rank sees the same batches.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from support.plain_module import assert_same_bits, loader, make_trainer
from support.spawn import rank_and_size, spawn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

from lit_diffusion.callbacks import EMA, MomentumDecay, PowerEMA
from lit_diffusion.callbacks.ema import ema_update_, span_decay
from lit_diffusion.callbacks.trainer_state import is_dtensor, local_part
from lit_diffusion.checkpoints.loading import load
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO, write_checkpoint

DECAYS = (0.9, 0.5)
EVERY = 2


def network():
    """7 rows do not divide by 2 or 3 ranks, 1 row is fewer than there are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))


NAMES = [name for name, _ in network().named_parameters(prefix="net")]


class Split(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.is_split = False
        self.losses = []

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self.is_split:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)  # keeps the others whole after a validation
            self.is_split = True

    def loss(self, batch):
        return self.net(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.05)


def trained(trainer):
    """The weights as they are, whole, on every rank; of the optimizer, which always has the parts.

    Asking the module would drop the whole ones that a forward pass may have left in it.
    """
    params = [param.detach() for param in trainer.optimizers[0].param_groups[0]["params"]]
    whole = [param.full_tensor() if is_dtensor(param) else param.clone() for param in params]
    return dict(zip(NAMES, whole, strict=True))


class Reference(Callback):
    """Averages whole weights by the formula, and watches what EMA does with the parts.

    Args:
        ema: the callback.
        folder: for the files that it saves.
        state: what EMA saved in an earlier run that goes on.
    """

    def __init__(self, ema, folder, state=None):
        self.ema, self.folder = ema, folder
        self.validations = 0
        self.steps = state["steps"]["net.0.weight"] if state else 0
        self.shadows = state["shadows"] if state else []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.shadows:
            self.shadows = [trained(trainer) for _ in DECAYS]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        self.raw = trained(trainer)
        if self.steps % EVERY == 0:
            for decay, shadow in zip(DECAYS, self.shadows, strict=True):
                span = span_decay(decay, self.steps - EVERY, self.steps, warmup=True)
                ema_update_(list(shadow.values()), list(self.raw.values()), span)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader=0):
        """The averages are in place, are what the forward pass uses, and are not what is saved."""
        if trainer.sanity_checking:
            return
        assert_same_bits(trained(trainer), self.shadows[0])
        trainer.save_checkpoint(self.folder / "validation.ckpt", weights_only=False)
        self.assert_saved(self.folder / "validation.ckpt")
        for name, weights in {"raw": self.raw, "ema": self.shadows[0]}.items():
            with self.ema.weights(name):
                self.assert_used(pl_module, weights, batch)
        self.validations += 1

    def assert_used(self, module, weights, batch):
        weights = {name.removeprefix("net."): weight for name, weight in weights.items()}
        expected = functional_call(network(), weights, batch[0]).square().mean()
        assert_same_bits(module.loss(batch), expected)

    def assert_saved(self, path):
        if path.is_dir():  # of parts, where what is not split has a file
            saved = torch.load(path / "meta.pt", weights_only=True)
            assert_same_bits(saved["callbacks"][self.ema.state_key]["shadows"], self.shadows)
            return
        saved = torch.load(path, weights_only=True)
        assert_same_bits({n: saved["state_dict"][n] for n in self.raw}, self.raw)
        assert_same_bits(saved["callbacks"][self.ema.state_key]["shadows"], self.shadows)
        assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 0.05


def averages_in(path):
    """What EMA saved in a checkpoint, a file or a folder of parts."""
    path = Path(path)
    saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
    return next(state for key, state in saved["callbacks"].items() if key.startswith("EMA"))


def fit(folder, ckpt_path=None, epochs=2, **options):
    """The trainer after a fit of 4 steps an epoch, which has saved end.ckpt."""
    ema = EMA(DECAYS, every_n_steps=EVERY, prefix="net")
    reference = Reference(ema, folder, averages_in(ckpt_path) if ckpt_path else None)
    trainer = make_trainer(
        folder,
        reference,
        ema,
        MomentumDecay(total_steps=16, min_beta1=0.2),
        max_epochs=epochs,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        plugins=[AtomicCheckpointIO()],
        **options,
    )
    trainer.fit(Split(), loader(), loader(8), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "end.ckpt", weights_only=False)
    reference.assert_saved(folder / "end.ckpt")
    assert reference.validations == (1 if ckpt_path else epochs)
    return trainer


def strategy(ranks, parts=False):
    """Keywords of a Trainer whose weights are split; `parts` has it save a folder of parts."""
    split = ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=parts
    )
    return {"devices": ranks, "strategy": split}


def read_end(folder):
    return torch.load(folder / "end.ckpt", weights_only=True)


def fit_split(folder, ckpt_path, epochs, parts):
    """The losses of a rank of a fit with split weights, of which it holds its averages alone."""
    rank, ranks = rank_and_size()
    trainer = fit(folder, ckpt_path, epochs, **strategy(ranks, parts))
    ema, module = trainer.callbacks[1], trainer.lightning_module
    weights = dict(zip(NAMES, trainer.optimizers[0].param_groups[0]["params"], strict=True))
    for shadow in ema._shadows:
        sizes = [local_part(shadow[name]).numel() for name in NAMES]
        assert sizes == [local_part(weights[name]).numel() for name in NAMES]
        assert (0 in sizes) == (rank > 0)
    with pytest.raises(TypeError, match=r"'state_dict\..*' is one rank's part"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": weights}, folder / "x.ckpt")
    if rank == 1:
        local_part(ema._shadows[1]["net.2.weight"])[-1, -1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"average of 'net\.2\.weight' \(decay 0\.5\)"):
        ema.state_dict()
    return module.losses


def on_ranks(folder, epochs, ckpt_path=None, parts=False, ranks=2):
    """The folder of a fit whose weights are split; each rank had the same losses."""
    folder.mkdir()
    losses = spawn(fit_split, ranks, folder, ckpt_path, epochs, parts)
    assert losses == [losses[0]] * ranks
    return folder


def on_one(folder, epochs, ckpt_path=None):
    """The folder of the same fit on one process, with whole weights."""
    folder.mkdir()
    fit(folder, ckpt_path, epochs)
    return folder


def assert_same_end(folder, other):
    """To the last bit, which two ranks allow: the mean of two equal gradients is exact."""
    for key in ("state_dict", "callbacks", "optimizer_states", "global_step"):
        assert_same_bits(read_end(folder)[key], read_end(other)[key])


@pytest.mark.slow
def test_a_fit_with_split_weights_ends_as_the_one_with_whole_weights(tmp_path):
    split, whole = on_ranks(tmp_path / "2", 2), on_one(tmp_path / "1", 2)
    assert_same_end(split, whole)
    for weights in ("raw", "ema_0.5"):
        weights_split, expected = (
            load(folder / "end.ckpt", weights, module=Split()) for folder in (split, whole)
        )
        assert_same_bits(weights_split.state_dict(), expected.state_dict())


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    undisturbed = on_one(tmp_path / "undisturbed", 2)
    one, two = on_one(tmp_path / "1", 1), on_ranks(tmp_path / "2", 1)
    parts = on_ranks(tmp_path / "parts", 1, parts=True)
    on_two = on_ranks(tmp_path / "1 to 2", 2, one / "end.ckpt")
    assert_same_end(on_two, undisturbed)
    assert_same_end(on_one(tmp_path / "2 to 1", 2, two / "end.ckpt"), undisturbed)
    on_three = on_ranks(tmp_path / "parts to 3", 2, parts / "end.ckpt", ranks=3)
    for key in ("state_dict", "callbacks"):  # the mean of three gradients is rounded
        end, expected = read_end(on_three)[key], read_end(undisturbed)[key]
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-6)


def fit_power_ema(folder, epochs, ckpt_path=None, **options):
    """The trainer after a fit of so many epochs in all, of 4 steps each; saves last.ckpt."""
    ema = PowerEMA(snapshot_every_n_steps=4, prefix="net")
    plugins = [AtomicCheckpointIO()]
    options |= {"max_epochs": epochs, "use_distributed_sampler": False}
    trainer = make_trainer(folder, ema, plugins=plugins, **options)
    trainer.fit(Split(), loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt", weights_only=False)
    return trainer


def fit_split_power_ema(folder, epochs, ckpt_path=None):
    """The step at the end; the averages of a rank are split as its weights are."""
    trainer = fit_power_ema(folder, epochs, ckpt_path, **strategy(rank_and_size()[1]))
    shadows = trainer.callbacks[0]._shadows
    assert all(is_dtensor(average) for shadow in shadows for average in shadow.values())
    return trainer.global_step


@pytest.mark.slow
def test_averages_of_any_width_are_those_of_whole_weights(tmp_path):
    """Also where the fit is resumed in between."""
    split, whole = tmp_path / "2", tmp_path / "1"
    assert spawn(fit_split_power_ema, 2, split, 4) == [16] * 2
    last = split / "checkpoints" / "last.ckpt"
    assert spawn(fit_split_power_ema, 2, split, 8, last) == [32] * 2
    fit_power_ema(whole, 8)
    files, others = (sorted((folder / "ema-snapshots").iterdir()) for folder in (whole, split))
    assert len(files) == 8
    assert [f.name for f in files] == [f.name for f in others]
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in others]
    for width in (0.05, 0.15):
        weights_split, expected = (
            load(run, f"power_{width}", module=Split()).state_dict() for run in (split, whole)
        )
        assert_same_bits(weights_split, expected)


# Without a Trainer


def follow(net, optimizer, state=None):
    """An EMA that follows an optimizer, as under a strategy that has just read the checkpoint."""
    ema = EMA((0.9, 0.5), warmup=False)
    ema.load_state_dict(state or {})
    strategy = SimpleNamespace(restore_checkpoint_after_setup=True)
    trainer = SimpleNamespace(optimizers=[optimizer], ckpt_path=None, strategy=strategy)
    ema.on_train_start(trainer, net)
    return ema


def average_on_a_grid(folder):
    """Weights split by tensor parallelism, then by fully_shard, over a grid of 2 x 2 ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(net, mesh["tensor"], plan), mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, foreach=False)
    ema = follow(net, optimizer)
    before = {name: param.detach().full_tensor() for name, param in net.named_parameters()}
    for param in net.parameters():
        param.grad = -2 * param.detach()
    optimizer.step()  # half of the result and half of the weight before is twice that one, exactly
    write_checkpoint({"state_dict": net.state_dict(), "ema": ema.state_dict()}, folder / "x.ckpt")
    dist.barrier()
    state = read_checkpoint(folder / "x.ckpt")["ema"]
    assert_same_bits(state["shadows"][1], {name: 2 * value for name, value in before.items()})
    again = follow(net, optimizer, state)
    for name, average in ema._shadows[1].items():
        assert_same_bits(local_part(again._shadows[1][name]), local_part(average))
    dist.barrier()


@pytest.mark.slow
def test_weights_that_are_split_twice_are_averaged_saved_and_loaded_too(tmp_path):
    spawn(average_on_a_grid, 4, tmp_path)
