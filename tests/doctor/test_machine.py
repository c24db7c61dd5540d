import re
from dataclasses import replace
from pathlib import Path

import pytest

from lit_diffusion.doctor.machine import (
    COMPROMISED,
    TESTED,
    Machine,
    check_cores,
    check_devices,
    check_disk,
    check_fid_weights,
    check_machine,
    check_placement,
    check_shared_memory,
    check_versions,
    check_workers,
    existing,
    fault_of_inception,
    look,
)
from lit_diffusion.doctor.report import Level
from lit_diffusion.metrics.weights import INCEPTION_FILE

ROOT = Path(__file__).parent.parent.parent


def test_tested_versions_are_those_of_the_constraints():
    stated = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: stated[name] for name in TESTED} == TESTED


def test_compromised_releases_are_those_that_the_package_refuses():
    setup = (ROOT / "setup.cfg").read_text()
    for name, versions in COMPROMISED.items():
        least = re.search(rf"^ +{name}>=(\S+)$", setup, re.M)[1]
        assert all(version < least for version in versions)


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, "torch 2.14.1"),
        ({"torch": "2.14.1+cu130"}, Level.OK, ""),
        ({"torch": "2.15.0"}, Level.NOTE, "torch 2.15.0 (tested 2.14.1)"),
        ({"torch": "2.1.0"}, Level.PROBLEM, "torch 2.1.0 is older than 2.11"),
        ({"lightning": "2.6.2"}, Level.PROBLEM, "compromised"),
        ({"pytorch-lightning": "2.6.3"}, Level.PROBLEM, "compromised"),
        ({"lightning": "2.6.4"}, Level.NOTE, ""),
        ({"torchmetrics": None}, Level.PROBLEM, "torchmetrics is not installed"),
        ({"torch": "from source"}, Level.NOTE, "from source"),
    ],
)
def test_versions(changes, level, told):
    versions = {k: v for k, v in {**TESTED, **changes}.items() if v is not None}
    found = check_versions(versions, {"torch": "2.11"})
    assert max(finding.level for finding in found) is level
    assert told in " ".join(finding.text for finding in found)


@pytest.mark.parametrize(
    ("machine", "level", "told"),
    [
        (Machine(gpus=("H100", "H100"), torch_build="CUDA 13.0"), Level.OK, "2 GPUs (H100)"),
        (Machine(has_driver=True), Level.PROBLEM, "built for CPUs alone"),
        (Machine(has_driver=True, torch_build="CUDA 13.0"), Level.PROBLEM, "can use no GPU"),
        (Machine(torch_build="CUDA 13.0"), Level.NOTE, "trains on the CPU"),
    ],
)
def test_torch_must_be_built_for_the_gpu(machine, level, told):
    finding = check_devices(machine)
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


def test_cores_that_an_affinity_takes_away_are_told():
    assert check_cores(Machine(cores=1, all_cores=64)).level is Level.NOTE
    assert check_cores(Machine(cores=64, all_cores=64)).level is Level.OK


def test_loading_processes_need_shared_memory():
    assert check_shared_memory(64 * 2**20).level is Level.WARNING  # what docker gives
    assert check_shared_memory(8 * 2**30).level is Level.OK
    assert check_shared_memory(None).level is Level.OK


@pytest.mark.parametrize(
    ("workers", "processes", "cores", "levels"),
    [
        (None, 8, 4, []),
        (0, 8, 4, [Level.OK]),
        (1, 4, 4, [Level.OK]),
        (2, 4, 4, [Level.WARNING]),
    ],
)
def test_loading_processes_need_cores(workers, processes, cores, levels):
    assert [finding.level for finding in check_workers(workers, processes, cores)] == levels


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
    assert check_disk("/runs", 10**9).level is Level.WARNING
    assert check_disk("/runs", 10**11).level is Level.OK


def test_a_folder_that_is_not_there_is_looked_for_above(tmp_path, monkeypatch):
    assert existing(tmp_path / "runs" / "new") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert existing(Path("runs")) == tmp_path


def test_this_machine_can_run_the_tests():
    machine = look(Path.cwd())
    assert machine.versions.keys() == TESTED.keys()
    assert 1 <= machine.cores <= machine.all_cores
    assert machine.free > 0
    assert {finding.topic for finding in check_machine(machine)} == {
        "versions",
        "devices",
        "cores",
        "loading",
        "FID weights",
        "disk",
    }
    worse = replace(machine, free=0)
    assert sum(f.level is Level.WARNING for f in check_machine(worse)) >= 1
