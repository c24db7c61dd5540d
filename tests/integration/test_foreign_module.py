"""The callbacks together in LightningModules that have nothing to do with this project."""

import copy
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.memory_logger import MemoryLogger
from support.pictures_module import PicturesModule, Stripes, pictures
from support.pixels import PixelProtocol
from support.plain_module import assert_close, assert_same_bits, make_trainer, trainable
from torch import nn
from torch.utils.data import DataLoader

from lit_diffusion.callbacks import EMA, FIDEvaluation, NoiseLevelLoss, SampleGrid, StepSeed
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.processes import CosineBetas, DiscreteVP


class BusyPictures(PicturesModule):
    """With a frozen, a shared and a BatchNorm layer; all that NoiseLevelLoss and FID ask for."""

    process, codec, num_classes = DiscreteVP(CosineBetas(10)), PixelCodec(), None

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm2d(1), nn.Linear(4, 4))
        self.again = self.net[0]
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x = self.frozen(batch[0].float() / 255)
        return super().training_step(batch, batch_idx) + self.net(self.again(x)).pow(2).mean()

    def per_sample_loss(self, x0, labels, t, noise, step=None):
        return (self.net(self.again(self.frozen(x0 + noise))) - x0).pow(2).mean((1, 2, 3))


class DictPictures(BusyPictures):
    """Reads batches as Stability's and CompVis' loaders give them."""

    def training_step(self, batch, batch_idx):
        return super().training_step([255 * (batch["jpg"] + 1) / 2], batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


class AsDicts(Stripes):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"cls": label, "jpg": image / 127.5 - 1}


@pytest.mark.parametrize("images", [None, "jpg", lambda batch: batch["jpg"]])
def test_callbacks_find_the_images_of_batches_that_are_dictionaries(tmp_path, caplog, images):
    caplog.set_level("INFO")
    module, memory = DictPictures(), MemoryLogger()
    module.codec = SimpleNamespace(encode=lambda images: images)
    at = {"cache_dir": tmp_path, "weights": "raw"}
    callbacks = [
        SampleGrid(3, images=images),
        NoiseLevelLoss(2, images=images),
        FIDEvaluation(6, PixelProtocol([]), **at, auxiliary_metrics=False, images=images),
    ]
    trainer = make_trainer(tmp_path, *callbacks, logger=memory)
    trainer.fit(module, *(DataLoader(AsDicts(num), batch_size=5) for num in (20, 8)))
    assert len(list((tmp_path / "samples").glob("nearest-*.png"))) == 1
    assert math.isfinite(memory.of("val/fid_6_raw")[0][1])
    assert len(memory.of("val/loss_u0.75")) == 1
    assert len({path.name for path in tmp_path.glob("*.npz")}) == 1


class TwoOptimizers(BusyPictures):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([self.shift], 0.1), torch.optim.SGD(self.net.parameters(), 0.1)]


def compiled():
    module = BusyPictures()
    module.net = torch.compile(module.net, backend="eager")
    return module


@pytest.mark.quick("BusyPictures-True", "TwoOptimizers-False")
@pytest.mark.parametrize(
    ("make", "validation"), [(BusyPictures, True), (TwoOptimizers, False), (compiled, True)]
)
def test_all_callbacks_work_together(tmp_path, make, validation):
    module, memory = make(), MemoryLogger()
    every_n_steps, cache = None if validation else 2, str(tmp_path / "cache")
    split = "val" if validation else "train"
    callbacks = [
        StepSeed(seed=1),
        SampleGrid(num=3, every_n_steps=every_n_steps),
        NoiseLevelLoss(2, every_n_steps=every_n_steps),
        FIDEvaluation(6, PixelProtocol([]), split, every_n_steps, cache_dir=cache),
        EMA(decays=(0.9, 0.5)),
    ]
    automatic = module.automatic_optimization
    options = {"max_epochs": 2, "accumulate_grad_batches": 2 if automatic else 1}
    trainer = make_trainer(tmp_path, *callbacks, logger=memory, **options)
    trainer.fit(module, pictures(), pictures(6) if validation else None)
    state = callbacks[-1].state_dict()
    names = {"shift", "net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"}
    assert set(state["steps"]) == names | {"net.2.weight", "net.2.bias"}
    assert set(state["steps"].values()) == {4 if automatic else 8}
    assert len(list((tmp_path / "samples").glob("step-*-ema.png"))) >= 2
    assert len(memory.of(f"{'val' if validation else 'train'}/loss_u0.75")) >= 2
    assert all(math.isfinite(fid) for _, fid in memory.of("val/fid_6"))
    assert len(memory.of("val/fid_6")) >= 2
    best = torch.load(tmp_path / "checkpoints" / "best-fid.ckpt", weights_only=True)
    assert best["state_dict"].keys() == module.state_dict().keys()
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert_same_bits(dict(module.state_dict()), dict(saved["state_dict"]))
    raw = trainable(module)
    with callbacks[-1].weights("ema_0.5"):
        now = {k.replace("_orig_mod.", ""): v for k, v in trainable(module).items()}
        assert_close(now, state["shadows"][1], 0)
    assert_same_bits(trainable(module), raw)
    alone = make()
    make_trainer(tmp_path, StepSeed(seed=1), **options).fit(alone, pictures())
    assert_same_bits(dict(module.state_dict()), dict(alone.state_dict()))


def test_the_snippet_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Path(__file__).parent / "foreign_project.py"
    spec = importlib.util.spec_from_file_location("foreign_project", path)
    project = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(project)
    trainer = project.main(folder=str(tmp_path / "run"), max_epochs=1)
    assert trainer.global_step == 12
    assert "val/fid_360" in trainer.callback_metrics
    grids = (tmp_path / "run/lightning_logs/version_0/samples").iterdir()
    assert {grid.name for grid in grids} == {"step-00000012-ema.png", "nearest-00000012-ema.png"}


def test_a_module_can_be_copied_and_pickled_after_fit(tmp_path):
    module = PicturesModule()
    make_trainer(tmp_path, EMA((0.9,))).fit(module, pictures())
    assert_same_bits(dict(copy.deepcopy(module).state_dict()), dict(module.state_dict()))
