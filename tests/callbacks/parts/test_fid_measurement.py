import pytest
import torch
from lightning.pytorch import Callback
from support.pixels import FEATURES, PixelProtocol, random_images
from support.rising import Rising, loader, trainer

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.parts.fid_measurement import FIDMeasurement, averaging_decay
from lit_diffusion.metrics.frechet import FrechetDistance

NUM = 12


@pytest.fixture
def fitted(tmp_path):
    module, run = Rising(), trainer(tmp_path, [])
    run.fit(module, loader(8), loader(30, seed=1))
    return module, run


def measurement(tmp_path, built=None, batch_size=5):
    protocol = PixelProtocol([] if built is None else built)
    return FIDMeasurement(NUM, protocol, "val", "raw", batch_size, tmp_path / "cache")


@pytest.mark.parametrize("first_seed", [0, NUM, 1000])
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_a_record_is_the_distance_of_its_seeds_whatever_the_batches(
    tmp_path, fitted, first_seed, batch_size
):
    module, run = fitted
    record = measurement(tmp_path, batch_size=batch_size).record(
        run, module, "val/fid", step=8, first_seed=first_seed
    )
    with torch.no_grad():
        samples = module.eval().generate(range(first_seed, first_seed + NUM))
    distance = FrechetDistance(FEATURES)
    distance.update(samples.flatten(1), real=False)
    distance.update(random_images(30, 1).flatten(1), real=True)
    assert record.value == pytest.approx(distance.compute().item(), rel=1e-6)
    assert record.seeds == (first_seed, first_seed + NUM)


def test_extractor_and_real_images_are_read_once_until_the_data_may_be_others(tmp_path, fitted):
    module, run = fitted
    built = []
    made = measurement(tmp_path, built)
    first = made.real(run, module, "val")
    assert made.real(run, module, "val") is first
    made.looks.clear()
    assert made.real(run, module, "val") is not first
    assert len(built) == 1


class Named(Callback):
    """A provider that is no EMA."""

    def __init__(self, *names):
        self._names = list(names)

    def names(self):
        return self._names

    def weights(self, name):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("callbacks", "name", "decay"),
    [
        ([EMA(decays=(0.99, 0.5))], "ema", 0.99),
        ([EMA(decays=(0.99, 0.5))], "ema_0.5", 0.5),
        ([EMA(decays=(0.99, 0.5))], "raw", None),
        ([], "raw", None),
        ([EMA((0.5,), prefix="a"), EMA((0.5,), prefix="b")], "ema", 0.5),
        ([EMA((0.5,), prefix="a"), EMA((0.9,), prefix="b")], "ema", None),
        ([Named("raw", "ema")], "ema", None),
        ([Named("raw", "ema_slow", "ema_2")], "ema_slow", None),
        ([Named("raw", "ema_slow", "ema_2")], "ema_2", None),
        ([Named("raw", "swa")], "swa", None),
    ],
)
def test_the_decay_is_what_the_names_of_a_provider_tell_if_they_tell_one(
    tmp_path, callbacks, name, decay
):
    assert averaging_decay(trainer(tmp_path, callbacks), name) == decay
