import logging

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from support.memory_logger import MemoryLogger
from support.pictures_module import PicturesModule, Stripes, pictures
from support.plain_module import PlainModule, loader, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lit_diffusion.callbacks import EMA, SampleGrid
from lit_diffusion.callbacks.sample_grid import image_grid
from lit_diffusion.protocols import NonFiniteSamples


def fit(folder, module, *callbacks, train=None, validate=True, **options):
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(module, train or pictures(), pictures(6) if validate else None)
    return trainer


def files(folder):
    return sorted(path.name for path in (folder / "samples").glob("*"))


def pixels(path):
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def test_grids_are_written_after_each_validation_within_fit_with_their_step(tmp_path):
    module = PicturesModule()
    trainer = fit(tmp_path, module, SampleGrid(5), max_epochs=2)  # 4 steps an epoch
    expected = [f"{kind}-{s:08d}-raw.png" for kind in ("nearest", "step") for s in (4, 8)]
    assert files(tmp_path) == expected
    calls = len(module.calls)
    trainer.validate(module, pictures(6), verbose=False)
    assert len(module.calls) == calls


def test_a_new_run_does_not_replace_the_grids_of_another(tmp_path):
    fit(tmp_path, PicturesModule(), SampleGrid(2))
    with pytest.raises(
        ValueError, match="samples belongs to another run: give the Trainer a logger"
    ):
        fit(tmp_path, PicturesModule(), SampleGrid(2))
    logger = CSVLogger(tmp_path, name="project")
    fit(tmp_path, PicturesModule(), SampleGrid(2), logger=logger)
    assert files(tmp_path / "project/version_0")


def test_fast_dev_run_generates_and_writes_nothing_and_may_be_repeated(tmp_path):
    for existing in ([], ["step-00000001-raw.png"]):  # those of a run are left alone
        for name in existing:
            (tmp_path / "samples").mkdir()
            (tmp_path / "samples" / name).touch()
        for _ in range(2):
            module = PicturesModule()
            fit(tmp_path, module, SampleGrid(2), fast_dev_run=True)
            assert module.calls == [([0, 1], None)]
        assert files(tmp_path) == existing
        assert not any((tmp_path / "samples" / name).stat().st_size for name in existing)


def test_grids_are_written_every_n_steps_without_validation(tmp_path):
    grid, options = SampleGrid(2, every_n_steps=3), {"max_epochs": 4, "accumulate_grad_batches": 2}
    fit(tmp_path, PicturesModule(), grid, validate=False, **options)  # 8 steps
    expected = ["step-00000003-raw.png", "step-00000006-raw.png"]
    assert [name for name in files(tmp_path) if "step" in name] == expected


@pytest.mark.parametrize("position", ["first", "last"])
def test_the_average_is_shown_where_there_is_one_whatever_the_order(tmp_path, position):
    module, ema, grid = PicturesModule(), EMA((0.9,)), SampleGrid(3)
    callbacks = [grid, ema] if position == "first" else [ema, grid]
    fit(tmp_path, module, *callbacks, SampleGrid(3, every_n_steps=4))
    module.eval()
    with torch.no_grad():
        raw = image_grid(module.generate([0, 1, 2]))
        with ema.weights("ema"):
            expected = image_grid(module.generate([0, 1, 2]))
    assert torch.equal(pixels(tmp_path / "samples" / "step-00000004-ema.png"), expected)
    assert not torch.equal(raw, expected)


def test_labels_are_taken_in_turn_or_left_to_the_module(tmp_path):
    module = PicturesModule()
    fit(tmp_path, module, SampleGrid(5, labels=range(2), batch_size=3))
    assert module.calls == [([0], None), ([0, 1, 2], [0, 1, 0]), ([3, 4], [1, 0])]
    module.calls.clear()
    fit(tmp_path / "other", module, SampleGrid(2))
    assert [labels for _, labels in module.calls[1:]] == [None]


def test_each_sample_stands_beside_its_nearest_training_image(tmp_path):
    class Copies(PicturesModule):
        def generate(self, seeds, labels=None):
            return torch.stack([Stripes()[7 * s + 2][0] for s in seeds])

    fit(tmp_path, Copies(), SampleGrid(2))
    memorised = torch.stack([Stripes()[2][0], Stripes()[9][0]])
    picture = pixels(tmp_path / "samples" / "nearest-00000004-raw.png")
    assert torch.equal(picture, image_grid(torch.cat([memorised, memorised], dim=-1)))


class Flipped(LightningDataModule):
    """Trains on mirrored images, and shows them as they are."""

    def fingerprint(self, split):
        return split

    def in_order(self, split):
        return DataLoader(Stripes(), batch_size=5)

    def train_dataloader(self):
        return DataLoader([(x.flip(-1), y) for x, y in Stripes()], batch_size=5)

    def val_dataloader(self):
        return self.in_order("val")


class Labelled(PicturesModule):
    num_classes = 3

    def generate(self, seeds, labels=None):
        return torch.stack([Stripes()[s][0] for s in seeds])


def test_samples_are_compared_with_training_images_as_they_are(tmp_path):
    grid = SampleGrid(2)
    make_trainer(tmp_path, grid, max_epochs=1).fit(Labelled(), Flipped())
    assert torch.equal(grid._training_images, torch.stack([x for x, _ in Stripes()]))


@pytest.mark.parametrize(
    ("names", "labels", "captions"),
    [
        (("plain", "dotted", "striped"), None, ["plain", "dotted", "striped", "plain"]),
        (("plain", "dotted", "striped"), [2, -1], ["striped", "", "striped", ""]),
    ],
)
def test_names_of_classes_stand_below_their_samples(tmp_path, names, labels, captions):
    data, module = Flipped(), Labelled()
    data.class_names = names
    make_trainer(tmp_path, SampleGrid(4, labels=labels), max_epochs=1).fit(module, data)
    picture, samples = pixels(tmp_path / "samples/step-00000004-raw.png"), module.generate(range(4))
    assert torch.equal(picture, image_grid(samples, captions))
    assert torch.equal(picture[0, 2:, 2:][: 6 * 43 : 43, : 4 * 43 : 43], samples[0, 0])


def test_labels_that_are_no_classes_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"labels must be in -1..2, got \[0, 3\]"):
        make_trainer(tmp_path, SampleGrid(4, labels=[0, 3])).fit(Labelled(), Flipped())


def noise(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 1, 6, 4), generator=generator).to(torch.uint8)


@pytest.mark.parametrize(
    ("seed", "least", "most", "every_n_steps", "steps"),
    [(0, 1.0, 1.0, 2, [1, 3]), (7, 0.35, 0.65, None, [3])],
)
def test_a_number_tells_copies_from_new_images(tmp_path, seed, least, most, every_n_steps, steps):
    """Trained on those of seed 0; those of another seed are as new as the held-out ones."""

    class Other(PicturesModule):
        def generate(self, seeds, labels=None):
            return noise(200, seed)[list(seeds)]

    grid = SampleGrid(200, every_n_steps=every_n_steps)
    memory, data = MemoryLogger(), [DataLoader([(x,) for x in noise(200, s)], 50) for s in (0, 3)]
    trainer = make_trainer(tmp_path, grid, max_epochs=1, logger=memory, log_every_n_steps=1)
    trainer.fit(Other(), *data)
    assert [step for step, _ in memory.of("val/memorized")] == steps
    assert all(least <= share <= most for _, share in memory.of("val/memorized"))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_that_cannot_be_compared_are_named_once(tmp_path, caplog, channels):
    module = PicturesModule()
    batches = [(x.float() if channels == 1 else x.expand(3, 6, 4), y) for x, y in Stripes()]
    with caplog.at_level(logging.INFO):
        fit(tmp_path, module, SampleGrid(2), train=DataLoader(batches, batch_size=5), max_epochs=2)
    assert caplog.text.count("shows no nearest training images") == 1
    assert not any("nearest" in name for name in files(tmp_path))


@pytest.mark.parametrize("shape", [(64, 1, 8, 8), (4, 3, 32, 32), (1, 4, 6, 4), (2, 1, 300, 300)])
def test_grids_of_small_images_are_about_512_pixels_wide_and_exact(shape):
    images = torch.randint(0, 256, shape).to(torch.uint8)
    grid = image_grid(images)
    assert grid.shape[0] == (4 if shape[1] == 4 else 3)
    assert 0.6 * 512 <= grid.shape[2] <= 1.3 * 512  # the last is not enlarged
    assert set(grid.unique().tolist()) - {127} == set(images.unique().tolist()) - {127}


def test_samples_that_are_not_finite_are_named_and_training_goes_on(tmp_path):
    class Diverges(PicturesModule):
        def generate(self, seeds, labels=None):
            raise NonFiniteSamples(seeds, self.global_step, "t = 7")

    with pytest.warns(UserWarning, match=r"nothing at step 4: 2 samples are not finite.*t = 7"):
        trainer = fit(tmp_path, Diverges(), SampleGrid(2))
    assert trainer.global_step == 4


def test_what_can_not_work_is_refused_before_training(tmp_path):
    with pytest.raises(TypeError, match="PlainModule has no such method"):
        make_trainer(tmp_path, SampleGrid(2)).fit(PlainModule(), loader(), loader())
    with pytest.raises(ValueError, match="every_n_steps=1000"):
        fit(tmp_path, PicturesModule(), SampleGrid(2), validate=False)
    for num, options in ((0, {}), (2, {"batch_size": 0}), (2, {"labels": []}), (10**12, {})):
        with pytest.raises(ValueError, match=r"at least|at most 10000.*got 1000000000000"):
            SampleGrid(num, **options)


def test_grids_go_to_tensorboard_and_not_to_loggers_without_pictures(tmp_path):
    board = TensorBoardLogger(tmp_path)
    fit(tmp_path, PicturesModule(), SampleGrid(2), logger=[CSVLogger(tmp_path / "csv"), board])
    board.finalize("success")
    events = EventAccumulator(board.log_dir).Reload()
    assert sorted(events.Tags()["images"]) == ["samples/nearest-raw", "samples/step-raw"]
    (event,) = events.Images("samples/step-raw")
    picture = pixels(tmp_path / "csv/lightning_logs/version_0/samples/step-00000004-raw.png")
    assert (event.step, event.height, event.width) == (4, *picture.shape[1:])
