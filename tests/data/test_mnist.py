import pytest
import torch
from support.mnist_files import digits, write
from torchvision import datasets

from lit_diffusion.data.mnist import MNIST, FashionMNIST


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for source in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(source, "mirrors", ["http://127.0.0.1:9/"])  # nobody listens there


@pytest.fixture
def root(tmp_path):
    for name in ("MNIST", "FashionMNIST"):
        write(tmp_path, train=50, val=20, name=name)
    return tmp_path


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_pixels_and_labels_are_those_of_the_files(root, kind):
    data, half = kind(str(root), batch_size=7), kind(str(root), part=(1, 2))
    assert data.pending_setup() is None
    data.prepare_data()
    for split, count in {"train": 50, "val": 20}.items():
        images, labels = digits(count, seed=count)
        assert torch.equal(data.images(split), images)
        assert torch.equal(data.dataset(split).labels, labels)
    assert data.num_classes == 10
    assert torch.equal(half.images("train"), data.images("train")[1::2])
    assert torch.equal(half.images("val"), data.images("val"))


@pytest.mark.parametrize("size", [8, 16])
def test_small_images_are_means_of_blocks(root, size):
    data, full = MNIST(str(root), image_size=size), MNIST(str(root))
    assert data.image_shape == (1, size, size)
    images, block = full.images("val").float(), 32 // size
    small, centre = data.images("val").float(), images[:, 0, 12 - 2 : 16 - 2, 12 - 2 : 16 - 2]
    row = 12 // block
    first = small[:, 0, row, row]
    assert (first - centre[:, :block, :block].mean((1, 2))).abs().max() <= 0.5
    total = images.sum((1, 2, 3)) / block**2  # the padding is 0
    assert (small.sum((1, 2, 3)) - total).abs().max() <= size**2 / 2
    with pytest.raises(ValueError, match="28, 16 or 8, got 14"):
        MNIST(str(root), image_size=14)


def test_without_a_network_missing_files_are_named(root, tmp_path_factory):
    (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    empty = tmp_path_factory.mktemp("other") / "empty"
    for folder, missing in (
        (root, rf"{root}/MNIST/raw: t10k-labels-idx1-ubyte missing"),
        (empty, rf"{empty}/MNIST/raw: train-images-idx3-ubyte, .* missing"),
    ):
        data = MNIST(str(folder))
        assert "needs a network" in data.pending_setup()
        assert not empty.exists()
        for read in (data.prepare_data, lambda data=data: data.images("val")):
            with pytest.raises(FileNotFoundError, match=missing):
                read()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("content", ["cut", "val"])
def test_damaged_files_and_those_of_another_split_are_refused(root, name, content):
    path = root / "MNIST" / "raw" / name
    if content == "cut":
        content = path.read_bytes()[:-28]
    elif content == "val":
        content = path.with_name(name.replace("train", "t10k")).read_bytes()
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"raw/train-\* are not files of MNIST \(.+\); delete them"
    ):
        MNIST(str(root)).images("train")
    assert len(MNIST(str(root)).images("val")) == 20
