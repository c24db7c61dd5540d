import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.cifar10_files import FOLDER, PER_FILE, contents, md5, published_as, write

from lit_diffusion.data.cifar10 import CIFAR10


@pytest.fixture
def small(tmp_path):
    """CIFAR10 for which the files in tmp_path are the published ones, and nothing is online."""

    class Small(CIFAR10):
        source = published_as(write(tmp_path))

    return Small


def test_pixels_and_labels_are_those_of_the_files(small, tmp_path):
    data = small(str(tmp_path), batch_size=7)
    data.prepare_data()
    files = [contents(seed) for seed in range(6)]
    expected = torch.from_numpy(np.stack([f["data"] for f in files])).view(6, PER_FILE, 3, 32, 32)
    assert torch.equal(data.images("train"), expected[:5].flatten(0, 1))
    assert torch.equal(data.images("val"), expected[5])
    assert data.dataset("train").labels.tolist() == [n for f in files[:5] for n in f["labels"]]
    assert data.images("val").is_contiguous()
    assert (CIFAR10.source.tgz_md5, data.num_classes) == ("c58f30108f718f92721af3b95e74349a", 10)


def test_training_images_are_mirrored_only_if_asked_for(small, tmp_path):
    for flip in (False, True):
        data = small(str(tmp_path), flip=flip, batch_size=60)
        images, _, index = next(iter(data.train_dataloader()))
        changed = (images != data.images("train")[index]).flatten(1).any(1)
        assert torch.equal(images[changed], data.images("train")[index][changed].flip(-1))
        assert changed.any() == flip
    assert torch.equal(next(iter(data.val_dataloader()))[0], data.images("val"))


def test_an_archive_in_the_folder_is_unpacked_without_a_network(small, tmp_path):
    offline = tmp_path / "offline"
    offline.mkdir()
    with tarfile.open(offline / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / FOLDER, FOLDER)
    small.source.tgz_md5 = md5(offline / "cifar-10-python.tar.gz")
    data = small(str(offline))
    assert "will be unpacked" in data.pending_setup()
    data.prepare_data()
    assert data.pending_setup() is None
    assert len(data.images("train")) == 60


def test_of_runs_that_start_at_once_one_downloads(small, tmp_path, monkeypatch):
    downloads, empty = [], tmp_path / "new"

    def download(source):
        if not source._check_integrity():
            downloads.append(source.root)
            time.sleep(0.1)
            write(empty)

    monkeypatch.setattr(small.source, "download", download)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: small(str(empty)).check(), range(2)))
    assert len(downloads) == 1


def test_without_files_and_network_the_message_says_what_to_put_where(small, tmp_path):
    data = small(str(tmp_path / "empty"))
    assert "needs a network" in data.pending_setup()
    assert not (tmp_path / "empty").exists()
    with pytest.raises(FileNotFoundError) as caught:
        data.prepare_data()
    for part in ("data_batch_1 is missing", "cifar-10-python.tar.gz", str(tmp_path / "empty")):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_damaged_file_is_named(small, tmp_path, name):
    path = tmp_path / FOLDER / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileNotFoundError, match=f"{name} is damaged"):
        small(str(tmp_path)).prepare_data()
    with pytest.raises(FileNotFoundError, match=f"{name} is damaged"):
        small(str(tmp_path)).images("train")
