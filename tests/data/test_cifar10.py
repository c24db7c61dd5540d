import tarfile

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


def test_without_files_and_network_the_message_says_what_to_put_where(small, tmp_path):
    data = small(str(tmp_path / "empty"))
    assert "needs a network" in data.pending_setup()
    assert not (tmp_path / "empty").exists()
    with pytest.raises(FileNotFoundError) as caught:
        data.prepare_data()
    for part in ("data_batch_1 is missing", "cifar-10-python.tar.gz", str(tmp_path / "empty")):
        assert part in str(caught.value)


def test_a_damaged_file_is_named(small, tmp_path):
    path = tmp_path / FOLDER / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (small(str(tmp_path)).prepare_data, lambda: small(str(tmp_path)).images("train")):
        with pytest.raises(FileNotFoundError, match="data_batch_3 is damaged"):
            read()
