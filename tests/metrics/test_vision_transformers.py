import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from support.golden import PIX, tensor
from support.pixels import random_images
from support.vision_transformers import (
    CASE,
    WRITERS,
    dinov2_shapes,
    fidelity_arguments,
    fidelity_extractor,
    publish,
    write_clip,
)
from torch_fidelity import calculate_metrics
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics import vision_transformers
from lit_diffusion.metrics.extractors import FIDProtocol, match_channels, protocol_by_name
from lit_diffusion.metrics.images import as_image_set
from lit_diffusion.metrics.reference import Scorer, measure_reference
from lit_diffusion.metrics.score import score_images
from lit_diffusion.metrics.vision_transformers import CLIP, DINOv2, dinov2_network


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A weight file of each protocol."""
    folder = tmp_path_factory.mktemp("weights")
    return {kind: write(folder / f"{kind.name}.pt") for kind, write in WRITERS.items()}


@pytest.fixture(params=WRITERS, ids=lambda kind: kind.name)
def protocol(request, files, monkeypatch):
    return publish(monkeypatch, request.param, files[request.param])


def pictures(num, size=224):
    """Images uint8 (num, 3, size, size) of digits in eight colors each, without fine detail."""
    digits = match_channels(Digits().images("val")[:num], 3)
    return torch.nn.functional.interpolate(digits, (size, size), mode="bicubic", antialias=True)


def by_pillow(images):
    size, bicubic = (224, 224), Image.Resampling.BICUBIC
    resized = [np.array(to_pil_image(image).resize(size, bicubic)) for image in images]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def test_protocols_are_known_by_torch_fidelitys_names():
    for kind in (DINOv2, CLIP):
        protocol = protocol_by_name(kind.name)
        assert protocol == kind()
        assert isinstance(protocol, FIDProtocol)
        assert (len(protocol.sha256), protocol.channels) == (64, 3)
    assert (DINOv2.name, CLIP.name) == ("dinov2-vit-l-14", "clip-vit-b-32")


# Features


@torch.no_grad()
def test_dinov2_has_the_features_of_the_published_network(files, monkeypatch):
    """Of facebookresearch/dinov2 in torch-fidelity's extractor: tests/golden/README.md."""
    images = ((PIX((4, 3, 32, 32), 1) + 1) * 127.5).round().to(torch.uint8)
    images = images.repeat_interleave(7, 2).repeat_interleave(7, 3)
    extractor = publish(monkeypatch, DINOv2, files[DINOv2]).build()
    expected = tensor(CASE, "features_f32")
    torch.testing.assert_close(extractor(images), expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_features_are_those_of_torch_fidelitys_extractor(protocol, monkeypatch):
    theirs, ours = fidelity_extractor(monkeypatch, protocol), protocol.build()
    images = random_images(3, 0, 3, 224)
    assert torch.equal(ours(images), theirs(images)[0])
    assert ours(images).shape == (3, ours.num_features)
    assert not ours.training
    assert not any(p.requires_grad for p in ours.parameters())


@torch.no_grad()
@pytest.mark.parametrize("size", [32, 300])
def test_images_of_other_sizes_are_resized_as_by_pillow(protocol, monkeypatch, size):
    theirs, ours = fidelity_extractor(monkeypatch, protocol), protocol.build()
    images = pictures(4, size)
    resized = vision_transformers._resize(images)
    difference = (resized.int() - by_pillow(images).int()).abs()
    assert difference.max() <= 2
    assert (difference > 0).double().mean() < 0.01
    assert torch.equal(ours(images), theirs(resized)[0])
    not_antialiased = theirs(images)[0]
    assert (ours(images) - not_antialiased).abs().max() > 1e-3


@pytest.mark.slow
@torch.no_grad()
def test_the_published_layout_of_vit_l_14_is_read():
    """304 million weights of the published names and shapes: 14 s and 2.6 GB."""
    shapes = dinov2_shapes("vitl14")
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    state["norm.weight"] += 1
    state["cls_token"].copy_(torch.linspace(-1, 1, 1024).view(1, 1, -1))
    network = dinov2_network(state).eval()
    num_weights = sum(weight.numel() for weight in state.values())
    assert num_weights == 304_368_640
    assert network.encoder.layers[0].self_attention.num_heads == 16
    expected = torch.nn.functional.layer_norm(state["cls_token"][0], (1024,), eps=1e-6)
    torch.testing.assert_close(network(torch.ones(1, 3, 224, 224)), expected)


# Distances


def write(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        to_pil_image(image).save(folder / f"{number:05d}.png")
    return folder


def test_distances_are_those_of_torch_fidelity_on_the_same_files(protocol, monkeypatch, tmp_path):
    images = pictures(30)
    fake, real = write(tmp_path / "fake", images[:14]), write(tmp_path / "real", images[14:] // 2)
    options = dict.fromkeys(("fid", "kid", "prc", "save_cpu_ram"), True)
    options |= dict.fromkeys(("cuda", "cache", "verbose"), False)
    options |= {"input1": str(fake), "input2": str(real), "kid_subset_size": 7}
    options |= fidelity_arguments(monkeypatch, protocol)
    theirs = calculate_metrics(feature_extractor=protocol.name, **options)
    ours = score_images(fake, real, protocol)
    for key, name in (
        ("frechet_inception_distance", "fid"),
        ("kernel_inception_distance_mean", "kid"),
        ("precision", "precision"),
        ("recall", "recall"),
    ):
        assert ours[name] == pytest.approx(theirs[key], rel=1e-3)
    assert ours["fid"] > 0.01
    assert (ours["metric"], ours["protocol"]) == (protocol.metric, protocol.name)
    assert "inception_score" not in ours


def test_a_set_has_no_distance_to_itself_and_its_halves_have_a_small_one(protocol, tmp_path):
    images = pictures(24, 32)
    darker = score_images(images // 2, images, protocol)["fid"]
    assert score_images(images, images, protocol)["fid"] < 1e-3 * darker
    scorer = Scorer(protocol, protocol.build(), torch.device("cpu"), 16)
    real = as_image_set(images, "real")
    reference = measure_reference(scorer, real, None, 12, tmp_path)
    assert reference.floor_images == "12 real images against 12 others of them"
    assert 0 < reference.floor < 0.5 * darker


# Files


def test_missing_and_foreign_files_are_refused_and_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = write_clip(tmp_path / "other.pt")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr("torch.jit.load", lambda *args, **kwargs: pytest.fail("loaded"))
    for kind in (DINOv2, CLIP):
        for ask in (kind().check, kind().build):
            with pytest.raises(FileNotFoundError, match=f"fetch-weights --extractor {kind.name}`"):
                ask()
        for ask in (kind(str(path)).check, kind(str(path)).build):
            message = rf"other.pt has SHA-256 {digest}, expected {kind().sha256}.*fetch-weights"
            with pytest.raises(ValueError, match=message):
                ask()


def test_code_in_a_weight_file_is_not_run(tmp_path, monkeypatch):
    """TorchScript is loaded from the published file alone, by whomever the class is called."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "evil.pth"
    torch.save({"pos_embed": Evil()}, path)
    with pytest.raises(pickle.UnpicklingError):
        publish(monkeypatch, DINOv2, path).build()
    assert not (tmp_path / "executed").exists()
    content = write_clip(tmp_path / "clip.pt").read_bytes()
    with pytest.raises(ValueError, match=r"must be the published weight file of clip-vit-b-32"):
        vision_transformers._CLIP(content)
    with pytest.raises(TypeError):
        vision_transformers._CLIP(str(tmp_path / "clip.pt"))
