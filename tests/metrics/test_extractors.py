import hashlib
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.inception import inception_of, write_random_inception
from support.pixels import random_images
from torchmetrics.image.fid import NoTrainInceptionV3

from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.extractors import (
    GRID,
    EmbeddedCNN,
    FIDProtocol,
    InceptionV3Compat,
    Pixels,
    RandomCNN,
    match_channels,
    protocol_by_name,
)
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.weight_files import WEIGHT_FILES, fetch_weights

PUBLISHED = ["inception-v3-compat", "dinov2-vit-l-14", "clip-vit-b-32"]
SHIPPED = ["digits-cnn", "patches-cnn"]
INCEPTION = WEIGHT_FILES["inception-v3-compat"]


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


@pytest.mark.parametrize("name", PUBLISHED + SHIPPED)
def test_protocols_have_names(name):
    protocol = protocol_by_name(name)
    assert isinstance(protocol, FIDProtocol)
    assert (protocol.name, len(protocol.sha256)) == (name, 64)
    with pytest.raises(ValueError, match=", ".join(PUBLISHED + SHIPPED)):
        protocol_by_name("inception")
    with pytest.raises(ValueError, match="digits-cnn, patches-cnn"):
        EmbeddedCNN("faces-cnn")


# Inception


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 320])
def test_inception_equals_torchmetrics_without_antialiasing_and_differs_with_it(inception, size):
    images = random_images(2, 0, 3, size)
    exact, antialiased = (
        NoTrainInceptionV3("inception-v3-compat", ["2048"], inception.weights_path, antialias)(
            images
        )
        for antialias in (False, True)
    )
    ours = inception.build()(images)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)
    assert (ours - antialiased).abs().max() > 0.01 * ours.abs().max()


def test_inception_looks_in_the_cache_of_torch_hub_and_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("tried to connect"))
    for ask in (InceptionV3Compat().check, InceptionV3Compat().build):
        with pytest.raises(FileNotFoundError, match=INCEPTION.filename) as error:
            ask()
        assert str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other.pth").write_bytes(b"of another network")
    with pytest.raises(ValueError, match="SHA-256"):
        InceptionV3Compat(str(tmp_path / "other.pth")).check()


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


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_classifier_is_the_file_that_was_recorded_small_and_narrow(name):
    protocol = EmbeddedCNN(name)
    protocol.check()
    content = protocol.path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == protocol.sha256
    assert len(content) < 400_000
    assert protocol.build().num_features <= 64
    if name == "digits-cnn":
        images, labels, _ = Digits().dataset("val").fetch([0] * 360, range(360))
        network = protocol.build()
        assert (network.logits(network(images)).argmax(1) == labels).double().mean() >= 0.98


def noisy(images, strength):
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 80 * strength * noise).round().clamp(0, 255).to(torch.uint8)


def blurred(images, strength):
    smooth = F.avg_pool2d(images.float(), 3, stride=1, padding=1, count_include_pad=False)
    return images.float().lerp(smooth, strength).round().to(torch.uint8)


def repeated(images, strength):
    few = images[: round(len(images) * (1 - 0.9 * strength))]
    return few.repeat(10, 1, 1, 1)[: len(images)]


@pytest.mark.quick("noisy")
@pytest.mark.parametrize("harm", [noisy, blurred, repeated])
def test_fid_grows_with_harm(harm):
    fake, real = Digits().images("train")[:360], Digits().images("val")
    digits = EmbeddedCNN("digits-cnn")
    values = [distance(digits, harm(fake, s), real) for s in (0, 0.25, 0.5, 1.0)]
    assert values == sorted(values)
    assert values[-1] > 4 * values[0]


CONTENT = b"stands for the weights"


@pytest.fixture(params=PUBLISHED)
def mirror(request, tmp_path, monkeypatch):
    """An extractor, and a mirror that serves CONTENT, which is what is expected of it."""
    (tmp_path / "mirror.pth").write_bytes(CONTENT)
    expect(monkeypatch, request.param, hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return request.param, (tmp_path / "mirror.pth").as_uri()


def expect(monkeypatch, name, sha256):
    monkeypatch.setitem(WEIGHT_FILES, name, replace(WEIGHT_FILES[name], sha256=sha256))


def test_weights_are_fetched_once_to_where_the_protocol_looks(mirror, tmp_path, monkeypatch):
    name, url = mirror
    cached = WEIGHT_FILES[name].cached_path()
    assert cached.parent == tmp_path / "torch/hub/checkpoints"
    with pytest.raises(ConnectionError, match=str(cached)):
        fetch_weights(url="file:///nowhere.pth", extractor=name)
    assert fetch_weights(url=url, extractor=name) == cached
    assert cached.read_bytes() == CONTENT
    assert fetch_weights(url="file:///nowhere", extractor=name) == cached
    if name != INCEPTION.extractor:  # whose protocol has taken its hash at import
        protocol_by_name(name).check()
    path = fetch_weights(tmp_path, url, name)
    assert path == tmp_path / cached.name
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=rf"{path.name} has SHA-256"):
        fetch_weights(tmp_path, url, name)
    cached.unlink()
    expect(monkeypatch, name, "0" * 64)
    with pytest.raises(ValueError, match="the file was deleted"):
        fetch_weights(url=url, extractor=name)
    assert list(cached.parent.iterdir()) == []


def test_weights_of_unknown_extractors_are_not_fetched():
    with pytest.raises(ValueError, match=rf"one of {', '.join(PUBLISHED)}, got 'digits-cnn'"):
        fetch_weights(extractor="digits-cnn")


def test_pixels_are_means_over_areas():
    images = random_images(4, 0, channels=2, size=4 * GRID)
    expected = images.double().view(4, 2, GRID, 4, GRID, 4).mean(dim=(3, 5)) / 127.5 - 1
    torch.testing.assert_close(
        Pixels(2).build()(images).double(), expected.flatten(1), atol=1e-6, rtol=0
    )


def test_an_untrained_network_is_the_same_wherever_it_is_built():
    images = random_images(8, 0, channels=3, size=32)
    torch.manual_seed(5)
    first = RandomCNN(3)
    state = torch.random.get_rng_state()
    features = first.build()(images)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(RandomCNN(3).build()(images), features)
    assert first.sha256 == RandomCNN(3).sha256 != RandomCNN(1).sha256


def test_channels_are_matched_where_no_colour_is_lost_or_invented():
    grey, colour = random_images(4, 0, channels=1), random_images(4, 0, channels=3)
    assert match_channels(grey, 1) is grey
    assert torch.equal(match_channels(grey, 3), torch.cat([grey] * 3, dim=1))
    assert torch.equal(match_channels(match_channels(grey, 3), 1), grey)
    odd = (random_images(4, 0, channels=2), random_images(4, 0, channels=4))
    refused = [(colour, 1), (grey, 2), (grey, 4), *((images, 3) for images in odd)]
    for images, channels in refused:
        with pytest.raises(ValueError, match=rf"{channels} channel\(s\), got {images.shape[1]}"):
            match_channels(images, channels)
