import hashlib

import pytest

from lit_diffusion.metrics import weights
from lit_diffusion.metrics.weights import cached_inception, fetch_weights, require

CONTENT = b"stands for 96 MB of weights"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror that serves CONTENT, which is what is expected; an empty cache of torch.hub."""
    (tmp_path / "mirror.pth").write_bytes(CONTENT)
    monkeypatch.setattr(weights, "INCEPTION_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return (tmp_path / "mirror.pth").as_uri()


def test_fetching_puts_the_file_where_the_protocol_looks(mirror):
    assert fetch_weights(url=mirror) == cached_inception()
    assert cached_inception().read_bytes() == CONTENT


def test_fetching_into_a_folder_keeps_the_name(mirror, tmp_path):
    assert fetch_weights(tmp_path, mirror) == tmp_path / weights.INCEPTION_FILE


def test_what_is_there_already_is_not_fetched_again(mirror):
    fetch_weights(url=mirror)
    assert fetch_weights(url="file:///nowhere").exists()


def test_another_file_than_the_expected_one_is_refused_and_not_kept(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "INCEPTION_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="nothing was kept"):
        fetch_weights(url=mirror)
    assert list(cached_inception().parent.iterdir()) == []


def test_without_a_network_the_message_says_where_to_put_the_file(mirror):
    with pytest.raises(ConnectionError, match=str(cached_inception())):
        fetch_weights(url="file:///nowhere.pth")


def test_missing_weights_are_named_with_the_way_to_get_them(tmp_path):
    path = tmp_path / "some.pth"
    with pytest.raises(FileNotFoundError, match="lit-diffusion fetch-weights") as error:
        require(path, "0" * 64, weights.FETCH)
    assert str(path) in str(error.value)
    assert weights.INCEPTION_FILE in str(error.value)


def test_a_truncated_download_is_told_by_its_hash(mirror, tmp_path):
    path = fetch_weights(tmp_path, mirror)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="SHA-256"):
        require(path, weights.INCEPTION_SHA256, weights.FETCH)
