"""1, 2 and 3 gloo processes: they draw different numbers, agree, and count each image once."""

import os
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare, norm
from support.pixels import PixelProtocol
from support.plain_module import assert_same_bits, make_trainer, trainable
from support.resuming import CALLBACKS, Recipe, assert_undisturbed
from support.spawn import rank_and_size, spawn
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks import EMA, FIDEvaluation
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits
from lit_diffusion.networks.unet import UNet
from lit_diffusion.timesteps import Independent, Stratified

STEPS, BATCH = 200, 8
VALUES = 6  # of each sample's noise that are looked at
INSTEAD = [name for name in CALLBACKS if name != "TimestepCurriculum"]
INSTEAD += ["LossSecondMomentResampler"]


def rank_options():
    size = rank_and_size()[1]
    return {"devices": size, "strategy": "ddp" if size > 1 else "auto"}


def train(folder, uniforms):
    """What training steps drew, and the weights and averages that they led to."""
    module, ema, u, noises = tiny_diffusion(uniforms=uniforms), EMA((0.9,)), [], []
    original = module.per_sample_loss

    def per_sample_loss(x0, labels, t, noise, step=None):
        noises.append(noise.flatten(1)[:, :VALUES].tolist())
        return original(x0, labels, t, noise, step)

    module.per_sample_loss = per_sample_loss
    module.on_train_batch_end = lambda outputs, *_: u.append(outputs["u"].tolist())
    trainer = make_trainer(folder, ema, max_steps=STEPS, max_epochs=-1, **rank_options())
    trainer.fit(module, images(48 * BATCH, BATCH))
    return u, noises, [trainable(module), ema.state_dict()["shadows"][0]]


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


def score(folder, num):
    """Validation loss and FID in float64, and which images and seeds were counted for them."""
    torch.manual_seed(1)
    network = UNet(1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, num_classes=10)
    for parameter in network.parameters():  # networks begin with zeros in places
        torch.nn.init.normal_(parameter, std=0.1)
    module = tiny_diffusion(num_classes=10, network=network, label_dropout=0.0)
    counted, seeds = [], []
    validation_step, generate = module.validation_step, module.generate

    def counting_step(batch, batch_idx):
        counted.extend(batch[2].tolist())
        validation_step(batch, batch_idx)

    def counting_generate(wanted, labels=None):
        seeds.extend(wanted)
        return generate(wanted, labels)

    cache = str(folder / f"cache{rank_and_size()[0]}")
    options = {"weights": "raw", "batch_size": 4, "cache_dir": cache, "auxiliary_metrics": False}
    fid = FIDEvaluation(num, PixelProtocol([]), **options)
    trainer = make_trainer(folder, fid, precision="64-true", **rank_options())
    data = FewDigits(num, batch_size=4)
    module.validation_step = counting_step
    module.generate = counting_generate
    trainer.validate(module, data, verbose=False)
    loss = trainer.callback_metrics["val/loss"].item()
    return {"loss": loss, "counted": counted, "seeds": seeds}


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
    return torch.load(folder / "whole" / "end.ckpt", weights_only=True)["state_dict"]


RARE = 1e-3  # draws are functions of fixed seeds: what passes once passes always


def assert_uniform_and_independent(u, bins=6):
    """By p of so uneven a spread of all draws (ranks, draws), and of a relation of two ranks'."""
    assert chisquare(np.histogram(u, bins=20, range=(0, 1))[0]).pvalue > RARE
    for one, other in combinations(u, 2):
        table = np.histogram2d(one, other, bins=bins, range=((0, 1), (0, 1)))[0]
        assert chi2_contingency(table).pvalue > RARE


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "uniforms"), [(2, Independent()), (3, Stratified())], ids=repr)
def test_ranks_draw_independent_times_and_noise_and_end_alike(tmp_path, ranks, uniforms):
    *draws, ends = zip(*spawn(train, ranks, tmp_path, uniforms), strict=True)
    u, noise = (np.array(values).reshape(ranks, -1) for values in draws)
    assert u.shape[1] == STEPS * BATCH
    assert noise.shape[1] == STEPS * BATCH * VALUES
    assert_uniform_and_independent(u)
    assert len(np.unique(u)) == u.size  # nor the same in other steps or places
    assert_uniform_and_independent(norm.cdf(noise))
    steps = noise.reshape(ranks * STEPS, -1)
    assert len(np.unique(steps, axis=0)) == len(steps)
    for end in ends[1:]:
        assert_same_bits(end, ends[0])


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_ranks(tmp_path):
    """Each image and each sample is counted once, whatever the remainder."""
    scores, num = {}, 31
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        results = spawn(score, ranks, folder, num)
        assert sorted(index for rank in results for index in rank["counted"]) == list(range(num))
        assert [rank["seeds"] for rank in results] == [
            list(range(rank, num, ranks)) for rank in range(ranks)
        ]
        assert len({rank["loss"] for rank in results}) == 1
        (record,) = read_evaluations(folder / "evaluations.jsonl")
        assert (record["num_fake"], record["num_real"]) == (num, num)
        scores[ranks] = (results[0]["loss"], record["value"], record["floor"])
    loss, *fids = scores.pop(1)
    for other_loss, *other_fids in scores.values():
        assert other_loss == pytest.approx(loss, rel=1e-14)
        assert other_fids == pytest.approx(fids, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callbacks", "step"), [(CALLBACKS, 3), (INSTEAD, 8)], ids=["curriculum-3", "resampler-8"]
)
def test_all_callbacks_together_resume_on_three_ranks(tmp_path, callbacks, step):
    first, *others = spawn(resume, 3, tmp_path, list(callbacks), step)
    for other in others:
        assert_same_bits(other, first)
