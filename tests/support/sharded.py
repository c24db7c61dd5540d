"""A fit whose weights fully_shard splits, unevenly, and what it must agree with.

On one process the same fit has whole weights: every rank sees the same batches.
"""

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

from lit_diffusion.callbacks import EMA, MomentumDecay
from lit_diffusion.callbacks.ema import ema_update_, span_decay
from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from support.plain_module import assert_same_bits, loader, make_trainer

DECAYS = (0.9, 0.5)
EVERY = 2


def network():
    """7 rows do not divide by 2 or 3 ranks, 1 row is fewer than there are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))


NAMES = [name for name, _ in network().named_parameters(prefix="net")]


class Split(LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        self.net = network()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.optimizer = optimizer
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
        return self.optimizer(self.net.parameters(), lr=0.05)


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
