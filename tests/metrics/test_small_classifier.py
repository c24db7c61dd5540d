import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.extractors import TrainedCNN, protocol_by_name
from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.images import ImageSet, as_image_set, open_split
from lit_diffusion.metrics.score import score_images
from lit_diffusion.metrics.small_classifier import (
    SmallClassifier,
    contrastive_loss,
    jitter,
    train_extractor,
)


def network():
    torch.manual_seed(0)
    return SmallClassifier(channels=1, size=8, widths=(4, 6), num_classes=10).eval()


def random(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator).byte()


@torch.no_grad()
def distance(network, fake, real):
    metric = FrechetDistance(network.num_features)
    metric.update(network(fake), real=False)
    metric.update(network(real), real=True)
    return metric.compute().item()


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [10, None])
def test_the_distance_grows_with_what_is_wrong_with_images(tmp_path, num_classes):
    data, path = Digits(), tmp_path / "own.safetensors"
    train_extractor(open_split(data, "train"), path, num_classes, steps=120 if num_classes else 250)
    protocol = TrainedCNN(path)
    network, real = protocol.build(), data.images("val")
    train = data.images("train")
    generator = torch.Generator().manual_seed(0)
    noise = 30 * torch.randn(train.shape, generator=generator)
    wrong = {
        "blurred": F.avg_pool2d(train.float(), 3, 1, 1, count_include_pad=False),
        "noisy": (train + noise).clamp(0, 255),
        "few": train[:8].repeat(40, 1, 1, 1),
        "mirrored": train.flip(-1),
    }
    least = distance(network, train, real)
    for name, images in wrong.items():
        assert distance(network, images.round().to(torch.uint8), real) > 2 * least, name
    if num_classes:
        (_, labels), *_ = open_split(data, "val").batches(1000)
        named = network.logits(network(real)).argmax(1)
        assert (named == torch.tensor(labels)).double().mean() > 0.9
    assert protocol.record["told_apart"] == ("classes" if num_classes else "images")
    assert str(data.fingerprint("train")) in protocol.record["trained_on"]


def test_jitter_turns_scales_and_shifts_as_much_as_it_says():
    line = -torch.ones(400, 1, 33, 33)
    line[..., 16, 4:29] = 1
    moved = jitter(line, torch.Generator().manual_seed(0))
    assert moved.min() == -1
    assert moved.max() == pytest.approx(1, abs=1e-3)
    mass = (moved[:, 0].double() + 1).clamp_min(0)
    mass /= mass.sum((1, 2), keepdim=True)
    place = torch.arange(33.0).double() - 16
    x, y = (mass.sum(1) * place).sum(1), (mass.sum(2) * place).sum(1)
    dx, dy = place - x.view(-1, 1, 1), place.view(-1, 1) - y.view(-1, 1, 1)
    xx, yy, xy = ((mass * part).sum((1, 2)) for part in (dx * dx, dy * dy, dx * dy))
    degrees = torch.rad2deg(torch.atan2(2 * xy, xx - yy) / 2)
    for values, most in ((degrees, 10), (x, 0.65), (y, 0.65), (xx + yy - 52, 14)):
        assert 0.9 * most < values.abs().max() < 1.2 * most


@pytest.mark.parametrize(("channels", "size"), [(1, (3, 5)), (4, (37, 64))])
def test_images_of_any_size_and_number_of_channels_are_scored(tmp_path, channels, size):
    path = tmp_path / "own.safetensors"
    images = random(24, channels, *size)
    train_extractor(as_image_set(images, "mine"), path, steps=2, batch_size=8)
    protocol = protocol_by_name(str(path))
    assert protocol.channels == channels
    scores = score_images(images[:12], images[12:], protocol)
    expected = distance(protocol.build(), images[:12], images[12:])
    assert scores["fid"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert scores["extractor_sha256"] == protocol.sha256
    assert protocol.name == f"own-{protocol.sha256[:8]}"
    protocol.copy_to(tmp_path / "new" / "run")
    (copy,) = (tmp_path / "new" / "run").iterdir()
    assert protocol_by_name(str(copy)).sha256 == protocol.sha256


def test_the_same_call_gives_the_same_file_and_disturbs_nobody(tmp_path):
    images = as_image_set(random(24, 1, 8, 8), "mine")
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_extractor(images, tmp_path / name / "own.safetensors", steps=3, batch_size=8)
    assert torch.equal(torch.rand(1), expected)
    a, b = (TrainedCNN(tmp_path / name / "own.safetensors") for name in ("a", "b"))
    assert a.name == b.name
    other = as_image_set(random(24, 1, 8, 9), "mine")
    train_extractor(other, tmp_path / "own.safetensors", steps=3, batch_size=8)
    assert TrainedCNN(tmp_path / "own.safetensors").name != a.name
    a.path.write_bytes(a.path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="Train the extractor again"):
        a.build()


def test_contrast_is_the_papers_equation():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    rows, total = torch.cat([one, other]), 0.0
    for i in range(10):
        terms = [torch.exp(torch.cosine_similarity(rows[i], row, dim=0) / 0.3) for row in rows]
        partner = terms[(i + 5) % 10]
        total -= torch.log(partner / (sum(terms) - terms[i])).item()
    assert contrastive_loss(one, other, 0.3).item() == pytest.approx(total / 10, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("own.ckpt", {}), ("own.safetensors", {"steps": 0}), ("own.safetensors", {"batch_size": 1})],
)
def test_bad_options_and_labels_that_are_no_classes_are_refused(tmp_path, name, options):
    images = as_image_set(random(4, 1, 8, 8), "mine")
    with pytest.raises(ValueError, match="an extractor needs a file name that ends in"):
        train_extractor(images, tmp_path / name, **options)
    for label in (-1, 3):
        labelled = TensorDataset(random(4, 1, 8, 8), torch.tensor([0, 1, 2, label]))
        with pytest.raises(ValueError, match=rf"{label}.* num_classes=3"):
            train_extractor(ImageSet("mine", labelled), tmp_path / "own.safetensors", 3, steps=2)


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "own.safetensors"
    with pytest.raises(FileNotFoundError, match=f"train-extractor .*--out {path}"):
        TrainedCNN(path)
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match="is damaged or no file of `train-extractor`"):
        TrainedCNN(path)
    record = {"name": "own", "size": [8, 8]}
    save_file({"head.weight": torch.zeros(2, 3)}, path, {"extractor": json.dumps(record)})
    with pytest.raises(ValueError, match="is damaged or no file of `train-extractor`"):
        TrainedCNN(path)
    state = network().state_dict()
    save_file(state, path, {"extractor": json.dumps({**record, "name": "../own"})})
    with pytest.raises(ValueError, match=r"its name is '\.\./own'"):
        TrainedCNN(path)
    state["head.bias"][0] = torch.nan  # would make the FID of any image NaN
    save_file(state, path, {"extractor": json.dumps(record)})
    with pytest.raises(ValueError, match=r"own.safetensors .* \(head.bias must be finite"):
        TrainedCNN(path)
