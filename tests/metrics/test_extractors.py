import hashlib
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from support.inception import inception_of, write_random_inception
from support.pixels import random_images
from torchmetrics.image.fid import NoTrainInceptionV3

from lit_diffusion.data.digits import Digits
from lit_diffusion.data.photo_patches import PhotoPatches
from lit_diffusion.metrics import weights
from lit_diffusion.metrics.extractors import (
    EmbeddedCNN,
    FIDProtocol,
    InceptionV3Compat,
    match_channels,
    protocol_by_name,
)
from lit_diffusion.metrics.frechet import FrechetDistance

NAMES = ["inception-v3-compat", "digits-cnn", "patches-cnn"]


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    """inception-v3-compat with random weights."""
    path = write_random_inception(tmp_path_factory.mktemp("inception") / "random.pth")
    return inception_of(path)


@torch.no_grad()
def distance(protocol, fake, real):
    extractor = protocol.build()
    metric = FrechetDistance(extractor.num_features)
    metric.update(extractor(fake), real=False)
    metric.update(extractor(real), real=True)
    return metric.compute().item()


# Protocols by name


@pytest.mark.parametrize("name", NAMES)
def test_every_protocol_has_its_name_and_fits_the_seam(name):
    protocol = protocol_by_name(name)
    assert protocol.name == name
    assert isinstance(protocol, FIDProtocol)
    assert len(protocol.sha256) == 64


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(NAMES)):
        protocol_by_name("inception")
    with pytest.raises(ValueError, match="digits-cnn, patches-cnn"):
        EmbeddedCNN("faces-cnn")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("digits-cnn", "digits-cnn"),
        (
            {
                "class_path": "lit_diffusion.metrics.extractors.EmbeddedCNN",
                "init_args": {"name": "digits-cnn"},
            },
            EmbeddedCNN("digits-cnn"),
        ),
        (
            {
                "class_path": "lit_diffusion.metrics.extractors.InceptionV3Compat",
                "init_args": {"weights_path": "w"},
            },
            InceptionV3Compat("w"),
        ),
    ],
)
def test_a_config_may_give_a_name_or_an_object(given, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--extractor", type=FIDProtocol | str)
    assert parser.instantiate(parser.parse_object({"extractor": given})).extractor == expected


# Inception


@pytest.mark.parametrize("size", [32, 320])
def test_inception_equals_torchmetrics_without_antialiasing_and_differs_with_it(inception, size):
    images = random_images(2, 0, 3, size)
    exact, antialiased = (
        NoTrainInceptionV3("inception-v3-compat", ["2048"], inception.weights_path, antialias)(
            images
        )
        for antialias in (False, True)
    )
    found = inception.build()(images)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    assert (found - antialiased).abs().max() > 0.01 * found.abs().max()


def test_inception_takes_colour_only_as_it_is_built_for(inception):
    assert inception.channels == 3
    with pytest.raises(ValueError, match="Bx3xHxW"):
        inception.build()(random_images(2, 0, channels=1, size=32))


def test_the_extractor_is_frozen_and_in_eval_mode(inception):
    for protocol in (inception, EmbeddedCNN("digits-cnn")):
        extractor = protocol.build()
        assert not any(module.training for module in extractor.modules())
        assert not any(parameter.requires_grad for parameter in extractor.parameters())


def test_inception_looks_in_the_cache_of_torch_hub_and_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("tried to connect"))
    for ask in (InceptionV3Compat().check, InceptionV3Compat().build):
        with pytest.raises(FileNotFoundError, match=weights.INCEPTION_FILE) as error:
            ask()
        assert str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_than_the_expected_ones_are_refused(inception):
    with pytest.raises(ValueError, match="SHA-256"):
        InceptionV3Compat(inception.weights_path).check()


def test_a_pickle_that_runs_code_is_not_run_even_if_its_hash_is_expected(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "evil.pth"
    torch.save({"weight": Evil()}, path)
    with pytest.raises(pickle.UnpicklingError):
        inception_of(path).build()
    assert not (tmp_path / "executed").exists()


# The classifiers that ship


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_shipped_classifier_is_the_file_that_was_recorded_small_and_narrow(name):
    protocol = EmbeddedCNN(name)
    protocol.check()
    content = protocol.source()[0].read_bytes()
    assert hashlib.sha256(content).hexdigest() == protocol.sha256
    assert len(content) < 400_000
    assert protocol.build().num_features <= 64


def test_digits_cnn_knows_98_percent_of_the_held_out_digits():
    images, labels, _ = Digits().dataset("val").fetch([0] * 360, range(360))
    network = EmbeddedCNN("digits-cnn").build()
    assert (network.head(network(images)).argmax(1) == labels).double().mean() >= 0.98


def digits():
    return Digits().images("train")[:360], Digits().images("val")


def patches():
    images = PhotoPatches(epoch_size=800).images("train")
    return images[:400], images[400:]


DATA = {"digits-cnn": digits, "patches-cnn": patches}


def noisy(images, strength):
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 80 * strength * noise).round().clamp(0, 255).to(torch.uint8)


def blurred(images, strength):
    smooth = F.avg_pool2d(images.float(), 3, stride=1, padding=1, count_include_pad=False)
    return images.float().lerp(smooth, strength).round().to(torch.uint8)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("harm", [noisy, blurred])
def test_fid_grows_with_visible_harm(name, harm):
    fake, real = DATA[name]()
    values = [distance(EmbeddedCNN(name), harm(fake, s), real) for s in (0, 0.25, 0.5, 1.0)]
    assert values == sorted(values)
    assert values[-1] > 4 * values[0]


def test_fid_of_digits_overlooks_noise_below_their_own_grey_steps():
    fake, real = digits()
    clean, dithered = (distance(EmbeddedCNN("digits-cnn"), noisy(fake, s), real) for s in (0, 0.05))
    assert dithered < 1.5 * clean


@pytest.mark.parametrize("name", NAMES[1:])
def test_fid_grows_when_few_images_are_repeated(name):
    fake, real = DATA[name]()
    few = fake[: len(fake) // 10].repeat(10, 1, 1, 1)
    assert distance(EmbeddedCNN(name), few, real) > 3 * distance(EmbeddedCNN(name), fake, real)


# Channels


def test_grey_is_repeated_where_colour_is_wanted_and_only_there():
    grey = random_images(4, 0, channels=1)
    assert torch.equal(match_channels(grey, 3), torch.cat([grey] * 3, dim=1))
    assert match_channels(grey, 1) is grey


def test_colour_becomes_grey_only_if_it_is_grey():
    grey = random_images(4, 0, channels=1)
    assert torch.equal(match_channels(match_channels(grey, 3), 1), grey)
    with pytest.raises(ValueError, match=r"1 channel\(s\), got 3"):
        match_channels(random_images(4, 0, channels=3), 1)


@pytest.mark.parametrize("channels", [2, 4])
def test_other_numbers_of_channels_are_refused(channels):
    with pytest.raises(ValueError, match=f"got {channels}"):
        match_channels(random_images(4, 0, channels=channels), 3)
    with pytest.raises(ValueError, match="got 1"):
        match_channels(random_images(4, 0, channels=1), channels)
