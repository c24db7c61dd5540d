from pathlib import Path

import pytest
import torch
from support.commands import call

from lit_diffusion.metrics.weight_files import WEIGHT_FILES

INCEPTION, DINOV2 = WEIGHT_FILES["inception-v3-compat"], WEIGHT_FILES["dinov2-vit-l-14"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    asked = []

    def download(url, path, hash_prefix):
        asked.append((url, Path(path)))

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return asked


def test_a_file_that_is_there_is_checked_and_not_downloaded(tmp_path, no_network, capsys):
    (tmp_path / INCEPTION.filename).write_bytes(b"broken")
    assert call(f"fetch-weights --to {tmp_path}") == 2
    assert "has SHA-256" in capsys.readouterr().err
    assert no_network == []


def test_the_mirror_and_the_place_are_those_asked_for(tmp_path, no_network):
    call(f"fetch-weights --to {tmp_path} --url https://mirror.example/x.pth")
    assert no_network == [("https://mirror.example/x.pth", tmp_path / INCEPTION.filename)]


def test_the_weights_are_those_of_the_extractor(tmp_path, no_network):
    call(f"fetch-weights --extractor dinov2-vit-l-14 --to {tmp_path}")
    assert no_network == [(DINOV2.url, tmp_path / "dinov2_vitl14_pretrain.pth")]


def test_extractors_without_a_file_are_refused(capsys):
    assert call("fetch-weights --extractor digits-cnn") == 2
    assert "one of inception-v3-compat, dinov2-vit-l-14, clip-vit-b-32" in capsys.readouterr().err
