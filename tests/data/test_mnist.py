import shutil
from pathlib import Path

import pytest
import torch
from support.mnist_files import digits, write
from torchvision import datasets
from torchvision.datasets import MNIST as Source

from lit_diffusion.data.mnist import MNIST, FashionMNIST


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for source in (Source, datasets.FashionMNIST):
        monkeypatch.setattr(source, "mirrors", ["http://127.0.0.1:9/"])  # nobody listens there


@pytest.fixture
def root(tmp_path):
    write(tmp_path, train=50, val=20)
    return tmp_path


def test_pixels_and_labels_are_those_of_the_files(root):
    data = MNIST(str(root), batch_size=7)
    assert data.pending_setup() is None
    data.prepare_data()
    for split, count in {"train": 50, "val": 20}.items():
        images, labels = digits(count, seed=count)
        assert torch.equal(data.images(split), images)
        assert torch.equal(data.dataset(split).labels, labels)
    assert data.num_classes == 10


def test_without_files_and_network_the_message_says_what_to_put_where(tmp_path):
    data = MNIST(str(tmp_path / "empty"))
    assert data.pending_setup().needs_network
    assert not (tmp_path / "empty").exists()
    with pytest.raises(FileNotFoundError) as caught:
        data.prepare_data()
    for part in ("t10k-labels-idx1-ubyte", str(tmp_path / "empty" / "MNIST" / "raw")):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_root_that_cannot_be_a_folder_ends_with_the_same_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte, .* missing"):
        MNIST(str(tmp_path / "file")).prepare_data()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("content", [b"", b"no digits at all", None])
def test_a_damaged_file_ends_with_a_message(root, name, content):
    path = root / "MNIST" / "raw" / name
    path.write_bytes(path.read_bytes()[:-28] if content is None else content)
    with pytest.raises(ValueError, match=rf"{name} is no file of MNIST \(.+\); delete it"):
        MNIST(str(root)).images("train")
    assert len(MNIST(str(root)).images("val")) == 20


def test_files_that_do_not_go_together_are_refused(root):
    raw = root / "MNIST" / "raw"
    (raw / "train-labels-idx1-ubyte").write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(ValueError, match=r"hold images \(50, 28, 28\) and labels \(20,\)"):
        MNIST(str(root)).images("train")


def test_one_missing_file_is_awaited(root):
    (root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    assert MNIST(str(root)).pending_setup().needs_network
    with pytest.raises(FileNotFoundError, match=r"raw: t10k-labels-idx1-ubyte missing"):
        MNIST(str(root)).prepare_data()


def test_a_download_puts_whole_files_in_their_place(root, tmp_path_factory, monkeypatch):
    """Into a folder of its own first: another process may download at the same time."""
    place = tmp_path_factory.mktemp("place")

    def download(self, root, download):
        assert Path(root).is_relative_to(place)
        shutil.copytree(source / "MNIST", Path(root) / "MNIST")

    source = root
    monkeypatch.setattr(Source, "__init__", download)
    MNIST(str(place)).prepare_data()
    assert torch.equal(MNIST(str(place)).images("val"), MNIST(str(root)).images("val"))
    assert len(list((place / "MNIST" / "raw").iterdir())) == 4


def test_clothes_are_read_from_a_folder_of_their_own(tmp_path):
    write(tmp_path, train=30, val=10)
    data = FashionMNIST(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FashionMNIST/raw: train-images-idx3-ubyte"):
        data.prepare_data()
    write(tmp_path, train=50, val=20, name="FashionMNIST")
    data.prepare_data()
    assert torch.equal(data.images("val"), digits(20, seed=20)[0])
    assert (data.num_classes, data.class_names[0]) == (10, "T-shirt/top")


def test_a_part_of_the_training_images_can_be_taken(tmp_path):
    write(tmp_path, train=50, val=20)
    whole, half = MNIST(str(tmp_path)), MNIST(str(tmp_path), part=(1, 2))
    assert torch.equal(half.images("train"), whole.images("train")[1::2])
    assert torch.equal(half.images("val"), whole.images("val"))
