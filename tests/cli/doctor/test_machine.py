import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from lit_diffusion.cli.doctor.machine import (
    COMPROMISED,
    check_devices,
    check_disk,
    check_fid_weights,
    check_machine,
    check_placement,
    check_shared_memory,
    check_versions,
    existing,
    fault_of_inception,
)
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.metrics.extractors import INCEPTION_FILE

ROOT = Path(__file__).parent.parent.parent


def test_compromised_releases_are_those_that_the_package_refuses():
    setup = (ROOT / "setup.cfg").read_text()
    for name, versions in COMPROMISED.items():
        least = re.search(rf"^ +{name}>=(\S+)$", setup, re.M)[1]
        assert all(version < least for version in versions)


@pytest.mark.parametrize(
    ("versions", "level", "told"),
    [
        ({"torch": "2.14.1"}, Level.OK, "torch 2.14.1"),
        ({"torch": "2.14.1+cu130"}, Level.OK, ""),
        ({"torch": "2.15.0.dev20270101"}, Level.OK, ""),
        ({"torch": "2.1.0"}, Level.PROBLEM, "torch 2.1.0 is not >=2.11"),
        ({"lightning": "2.6.2"}, Level.PROBLEM, "compromised"),
        ({"pytorch-lightning": "2.6.3"}, Level.PROBLEM, "compromised"),
        ({"lightning": "2.6.4"}, Level.OK, ""),
        ({"lightning": "2.7.0"}, Level.PROBLEM, "lightning 2.7.0 is not <2.7,>=2.6.4"),
    ],
)
def test_versions(versions, level, told):
    stated = {"torch": SpecifierSet(">=2.11"), "lightning": SpecifierSet(">=2.6.4,<2.7")}
    (finding,) = check_versions(versions, stated)
    assert finding.level is level
    assert told in finding.text


@pytest.mark.parametrize(
    ("gpus", "torch_build", "has_driver", "level", "told"),
    [
        (["H100", "H100"], "CUDA 13.0", True, Level.OK, "2 GPUs (H100)"),
        ([], "CPU", True, Level.PROBLEM, "built for CPUs alone"),
        ([], "CUDA 13.0", True, Level.PROBLEM, "can use no GPU"),
        ([], "CUDA 13.0", False, Level.NOTE, "trains on the CPU"),
    ],
)
def test_torch_must_be_built_for_the_gpu(gpus, torch_build, has_driver, level, told):
    finding = check_devices(gpus, torch_build, has_driver)
    assert finding.level is level
    assert told in finding.text


@pytest.mark.parametrize(
    ("device", "wanted", "processes", "cores", "level"),
    [
        ("cuda", "auto", 8, 2, Level.OK),
        ("cpu", "cpu", 2, 2, Level.OK),
        ("cpu", "auto", 1, 2, Level.NOTE),
        ("cpu", "cpu", 3, 2, Level.WARNING),
    ],
)
def test_where_processes_compute(device, wanted, processes, cores, level):
    assert check_placement(device, wanted, processes, cores).level is level


def test_loading_processes_need_shared_memory():
    assert check_shared_memory(64 * 2**20).level is Level.WARNING  # what docker gives
    assert check_shared_memory(8 * 2**30).level is Level.OK
    assert check_shared_memory(None).level is Level.OK


def test_missing_weights_of_inception_matter_to_some_only():
    assert check_fid_weights(None).level is Level.OK
    assert check_fid_weights("no extractor weights.").level is Level.NOTE


def test_what_is_wrong_with_weights_is_told_with_a_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub._hub_dir", None, raising=False)
    assert fault_of_inception().startswith(f"no extractor weights at {tmp_path}")
    assert "lit-diffusion fetch-weights" in fault_of_inception()
    file = tmp_path / "hub" / "checkpoints" / INCEPTION_FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half of it")
    assert "has SHA-256" in fault_of_inception()
    assert "lit-diffusion fetch-weights" in fault_of_inception()


def test_little_room_is_told():
    assert check_disk(Path("/runs"), 10**9).level is Level.WARNING
    assert check_disk(Path("/runs"), 10**11).level is Level.OK


def test_a_folder_that_is_not_there_is_looked_for_above(tmp_path, monkeypatch):
    assert existing(tmp_path / "runs" / "new") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert existing(Path("runs")) == tmp_path


def test_this_machine_can_run_the_tests(monkeypatch, tmp_path):
    found = check_machine(tmp_path / "nowhere")
    assert {finding.topic for finding in found} == {
        "versions",
        "devices",
        "loading",
        "FID weights",
        "disk",
    }
    told = next(finding.text for finding in found if finding.topic == "versions")
    assert all(name in told for name in ("torch ", "lightning", "torchmetrics", "torch-fidelity"))
    monkeypatch.setattr("lit_diffusion.cli.doctor.machine.LITTLE", 1e30)
    assert check_machine(tmp_path)[-1].level is Level.WARNING
