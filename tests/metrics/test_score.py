import pytest
from support.fidelity import fidelity_arguments
from support.inception import inception_of, write_random_inception
from support.pixels import random_images
from torch_fidelity import calculate_metrics
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.extractors import EmbeddedCNN
from lit_diffusion.metrics.score import score_images

NAMES = {
    "frechet_inception_distance": "fid",
    "kernel_inception_distance_mean": "kid",
    "kernel_inception_distance_std": "kid_std",
    "precision": "precision",
    "recall": "recall",
    "inception_score_mean": "inception_score",
    "inception_score_std": "inception_score_std",
}


def write(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        to_pil_image(image).save(folder / f"{number:05d}.png")
    return folder


def by_torch_fidelity(fake, real, subset, extractor):
    options = dict.fromkeys(("fid", "kid", "prc", "isc", "save_cpu_ram"), True)
    options |= dict.fromkeys(("cuda", "cache", "verbose"), False) | extractor
    options |= {"input1": str(fake), "input2": str(real), "kid_subset_size": subset}
    scores = calculate_metrics(**options)
    return {NAMES[key]: value for key, value in scores.items() if key in NAMES}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """120 training digits and 100 held-out ones: as tensors and as folders of grey PNGs."""
    root = tmp_path_factory.mktemp("digits")
    fake, real = Digits().images("train")[:120], Digits().images("val")[:100]
    return fake, real, write(root / "fake", fake), write(root / "real", real)


def test_scores_are_those_of_torch_fidelity_on_the_same_files(digits):
    fake, real, *folders = digits
    protocol = EmbeddedCNN("digits-cnn")
    expected = by_torch_fidelity(*folders, 50, fidelity_arguments(protocol))
    scores = score_images(*folders, protocol)
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert score_images(fake, real, protocol) == pytest.approx(scores)


@pytest.mark.slow
def test_scores_of_inception_are_those_of_torch_fidelity_on_the_same_files(tmp_path):
    path = write_random_inception(tmp_path / "random.pth")
    fake = write(tmp_path / "fake", random_images(10, 0, 3, 32))
    real = write(tmp_path / "real", random_images(12, 1, 3, 32) // 2)
    arguments = {"feature_extractor_weights_path": str(path)}
    arguments["feature_extractor"] = "inception-v3-compat"
    expected = by_torch_fidelity(fake, real, 5, arguments)
    scores = score_images(fake, real, inception_of(path))
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-3)
