"""What test_ranks.py runs on several ranks."""

import hashlib
import os

import torch
from lightning.pytorch import Callback

from lit_diffusion.callbacks import EMA, FIDEvaluation
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits
from lit_diffusion.networks.unet import UNet
from lit_diffusion.timesteps import Independent, Stratified
from support.pixels import PixelProtocol
from support.plain_module import make_trainer
from support.resuming import CALLBACKS, Recipe, assert_undisturbed
from support.spawn import rank_and_size
from support.tiny_diffusion import images, tiny_diffusion

STEPS, BATCH = 200, 8
VALUES = 6  # of each sample's noise that are looked at
DRAWS = {"stratified": Stratified, "independent": Independent}
TOGETHER = list(CALLBACKS)
INSTEAD = [
    *(name for name in CALLBACKS if name != "TimestepCurriculum"),
    "LossSecondMomentResampler",
]


def _options():
    size = rank_and_size()[1]
    return {"devices": size, "strategy": "ddp" if size > 1 else "auto"}


def digest(tensors):
    """Of all bits of {name: tensor}."""
    summed = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        summed.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return summed.hexdigest()


class Watch(Callback):
    """Collects the u of each training step."""

    def __init__(self):
        self.u = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.u.append(outputs["u"].tolist())


def train(folder, draws):
    """What training steps drew, and the weights and averages that they led to."""
    module, watch, ema, noises = tiny_diffusion(uniforms=DRAWS[draws]()), Watch(), EMA((0.9,)), []
    original = module.per_sample_loss

    def per_sample_loss(x0, labels, t, noise, step=None):
        noises.append(noise.flatten(1)[:, :VALUES].tolist())
        return original(x0, labels, t, noise, step)

    module.per_sample_loss = per_sample_loss
    trainer = make_trainer(folder, watch, ema, max_steps=STEPS, max_epochs=-1, **_options())
    trainer.fit(module, images(48 * BATCH, BATCH))
    ends = [digest(dict(module.named_parameters())), digest(ema.state_dict()["shadows"][0])]
    return {"u": watch.u, "noise": noises, "ends": ends}


class FewDigits(Digits):
    """So many of the held-out digits."""

    def __init__(self, num, batch_size):
        super().__init__(batch_size=batch_size)
        self.num = num

    def load(self, split):
        whole = super().load(split)
        if split == "train":
            return whole
        return TensorImages(whole.images[: self.num], whole.labels[: self.num])


def score(folder, num, batch_size, extractor):
    """Validation loss and FID in float64, and which images and seeds were counted for them."""
    module = tiny_diffusion(num_classes=10, network=_network(), label_dropout=0.0)
    counted, seeds = [], []
    validation_step, generate = module.validation_step, module.generate

    def counting_step(batch, batch_idx):
        counted.extend(batch[2].tolist())
        validation_step(batch, batch_idx)

    def counting_generate(wanted, labels=None):
        seeds.extend(wanted)
        return generate(wanted, labels)

    cache = str(folder / f"cache{rank_and_size()[0]}")
    protocol = PixelProtocol([]) if extractor == "pixels" else extractor
    options = {"weights": "raw", "batch_size": 4, "cache_dir": cache, "auxiliary_metrics": False}
    fid = FIDEvaluation(num, protocol, **options)
    trainer = make_trainer(folder, fid, precision="64-true", **_options())
    data = FewDigits(num, batch_size)
    module.validation_step = counting_step
    module.generate = counting_generate
    trainer.validate(module, data, verbose=False)
    loss = trainer.callback_metrics["val/loss"].item()
    return {"loss": loss, "counted": counted, "seeds": seeds}


def _network():
    torch.manual_seed(1)
    network = UNet(1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, num_classes=10)
    for parameter in network.parameters():  # networks begin with zeros in places
        torch.nn.init.normal_(parameter, std=0.1)
    return network


def resume(folder, names, step):
    """Have a run with these callbacks die and go on; it ends as an undisturbed one, or raises."""
    os.chdir(folder)
    _, size = rank_and_size()
    # DDP regroups gradients after the first step of a process, unless it looks for unused ones; and
    # the last bit of a sum of three ranks depends on the group. That of two does not.
    strategy = "ddp_find_unused_parameters_true"
    trainer = (("devices", size), ("strategy", strategy), ("accumulate_grad_batches", 2))
    # An epoch has five batches of the ranks, as of the one elsewhere.
    recipe = Recipe(tuple(names), trainer=trainer, batch_size=-(-56 // size))
    assert_undisturbed(folder, recipe, step)
    saved = torch.load(folder / "whole" / "end.ckpt", weights_only=True)
    return digest(saved["state_dict"])
