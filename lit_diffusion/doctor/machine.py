"""Whether this machine can train: versions, devices, cores, weights of FID, disk."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from lit_diffusion.doctor.report import Finding, count, note, ok, problem, size, warning
from lit_diffusion.metrics.weights import FETCH, INCEPTION_SHA256, cached_inception, require

TESTED = {
    "torch": "2.14.1",
    "torchvision": "0.29.2",
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "torchmetrics": "1.9.0",
    "torch-fidelity": "0.4.0",
    "jsonargparse": "4.53.0",
}
"""Versions that the tests were run with: those of constraints.txt on which numbers depend."""

COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
"""Releases with code of somebody else."""

LITTLE = 5e9
"""Free bytes of a disk below which that is told."""


@dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        versions: of the packages in `TESTED` that are installed.
        least: lowest versions that lit-diffusion is made for, as its package says.
        torch_build: "CUDA 12.8", "ROCm 6.2", or "CPU".
        gpus: names of those that torch can use.
        has_driver: whether an NVIDIA driver is there, of use to torch or not.
        cores: that this process may use.
        all_cores: of the machine.
        shared_memory: free bytes of /dev/shm, through which loading processes hand over batches;
            None where there is none.
        fid_weights: what is wrong with the weight file of Inception; None where it is right.
        folder: where runs would go.
        free: bytes on its disk.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, str] = field(default_factory=dict)
    torch_build: str = "CPU"
    gpus: tuple[str, ...] = ()
    has_driver: bool = False
    cores: int = 1
    all_cores: int = 1
    shared_memory: int | None = None
    fid_weights: str | None = None
    folder: str = "."
    free: int = 0


def check_machine(machine: Machine) -> list[Finding]:
    """All that can be told without a config."""
    return [
        *check_versions(machine.versions, machine.least),
        check_devices(machine),
        check_cores(machine),
        check_shared_memory(machine.shared_memory),
        check_fid_weights(machine.fid_weights),
        check_disk(machine.folder, machine.free),
    ]


def check_versions(versions: Mapping[str, str], least: Mapping[str, str]) -> list[Finding]:
    """Compare what is installed with what is tested."""
    found = [*_compromised(versions), *_missing(versions), *_too_old(versions, least)]
    graver = {finding.text.split()[0] for finding in found}
    others = [
        f"{name} {have} (tested {TESTED[name]})"
        for name, have in versions.items()
        if name not in graver and _public(have) != TESTED[name]
    ]
    if others:
        found.append(note("versions", f"{', '.join(others)}; pip install -c constraints.txt."))
    return found or [ok("versions", ", ".join(f"{n} {v}" for n, v in versions.items()))]


def _compromised(versions: Mapping[str, str]) -> list[Finding]:
    return [
        problem(
            "versions",
            f"{name} {have} is a compromised release: uninstall it, change what secrets this "
            f"machine holds, and install {TESTED[name]}.",
        )
        for name, have in versions.items()
        if _public(have) in COMPROMISED.get(name, ())
    ]


def _missing(versions: Mapping[str, str]) -> list[Finding]:
    return [
        problem("versions", f"{name} is not installed; pip install {name}=={wanted}.")
        for name, wanted in TESTED.items()
        if name not in versions
    ]


def _too_old(versions: Mapping[str, str], least: Mapping[str, str]) -> list[Finding]:
    return [
        problem("versions", f"{name} {have} is older than {least[name]}, the least that works.")
        for name, have in versions.items()
        if name in least and _is_below(have, least[name])
    ]


def _is_below(have: str, least: str) -> bool:
    try:
        return Version(have) < Version(least)
    except InvalidVersion:
        return False


def _public(version: str) -> str:
    """Without the local part that tells builds apart: 2.14.1+cpu is 2.14.1."""
    return version.partition("+")[0]


def check_devices(machine: Machine) -> Finding:
    """Whether torch is built for the GPU that is there."""
    if machine.gpus:
        names = ", ".join(dict.fromkeys(machine.gpus))
        return ok("devices", f"{count(len(machine.gpus), 'GPU')} ({names}), {machine.torch_build}")
    if machine.has_driver and machine.torch_build == "CPU":
        return problem(
            "devices",
            "an NVIDIA driver is here, but torch is built for CPUs alone; install a CUDA build of "
            "it (pytorch.org/get-started).",
        )
    if machine.has_driver:
        return problem(
            "devices",
            f"an NVIDIA driver is here, but torch ({machine.torch_build}) can use no GPU: it may "
            "be too old for this build, or CUDA_VISIBLE_DEVICES hides the GPUs; see nvidia-smi.",
        )
    return note("devices", f"no GPU here: torch ({machine.torch_build}) trains on the CPU.")


def check_placement(device: str, wanted: str, processes: int, cores: int) -> Finding:
    """Where the processes of a run compute.

    Args:
        device: "cpu" or "cuda", that the Trainer takes.
        wanted: the accelerator that the config asks for.
        processes: of the run on this node.
        cores: of this node.
    """
    where = count(processes, "GPU") if device != "cpu" else f"{count(processes, 'process')} on CPUs"
    if device == "cpu" and processes > cores:
        text = f"{where} share {count(cores, 'core')}"
        return warning("devices", f"{text}; lower --trainer.devices, or look again where GPUs are.")
    if device == "cpu" and wanted == "auto":
        return note("devices", f"accelerator=auto finds no GPU here: {where}.")
    return ok("devices", where)


def check_cores(machine: Machine) -> Finding:
    """How many cores this process may use."""
    if machine.cores < machine.all_cores:
        return note(
            "cores",
            f"this process may use {machine.cores} of {machine.all_cores} (affinity); on SLURM, "
            "--cpus-per-task gives more.",
        )
    return ok("cores", f"{machine.cores}")


def check_shared_memory(free: int | None) -> Finding:
    """Whether loading processes can hand over batches."""
    if free is not None and free < 2**28:
        return warning(
            "loading",
            f"{size(free)} are free in /dev/shm, through which loading processes hand over "
            "batches; start the container with --shm-size=8g, or load with num_workers: 0.",
        )
    told = "" if free is None else f", {size(free)} of shared memory for them"
    return ok("loading", f"processes that load data can be started{told}")


def check_workers(workers: int | None, processes: int, cores: int) -> list[Finding]:
    """Whether there are cores for the loading processes that a config asks for.

    Args:
        workers: of each process; None leaves their number to us.
        processes: of the run, on this node.
        cores: of this node.
    """
    if workers is None:
        return []
    told = f"num_workers={workers} for each of {count(processes, 'rank')}, {count(cores, 'core')}"
    if workers * processes > max(cores, 1):
        each = max(cores // processes, 1)
        return [warning("loading", f"{told} here: they wait for each other; try {each}.")]
    return [ok("loading", told)]


def check_fid_weights(fault: str | None) -> Finding:
    """Whether the network of the literature's FID is there."""
    if fault is None:
        return ok("FID weights", "those of inception-v3-compat are here, with the right SHA-256")
    return note("FID weights", f"{fault} digits-cnn and patches-cnn need none.")


def check_disk(folder: str, free: int) -> Finding:
    """Whether there is room at all."""
    told = f"{size(free)} are free in {folder}"
    return ok("disk", told) if free >= LITTLE else warning("disk", f"only {told}.")


# Facts


def look(folder: Path) -> Machine:
    """This machine.

    Args:
        folder: where a run would go; need not be there.
    """
    there = existing(folder)
    return Machine(
        versions=_versions(),
        least=_least(),
        torch_build=_torch_build(),
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        cores=usable_cores(),
        all_cores=os.cpu_count() or 1,
        shared_memory=_free(Path("/dev/shm")),  # noqa: S108 - only looked at
        fid_weights=fault_of_inception(),
        folder=str(there),
        free=shutil.disk_usage(there).free,
    )


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there.

    Example:
        >>> existing(Path("/no/such/folder"))
        PosixPath('/')
    """
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def usable_cores() -> int:
    """Cores that the affinity of this process allows."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fault_of_inception() -> str | None:
    """What is wrong with the weights where `inception-v3-compat` looks; None if nothing is."""
    try:
        require(cached_inception(), INCEPTION_SHA256, FETCH)
    except (OSError, ValueError) as error:
        return in_short(error)
    return None


def in_short(error: Exception) -> str:
    """What is wrong with a weight file, with a short cure."""
    cure = "run `lit-diffusion fetch-weights` where there is a network."
    return str(error).replace(FETCH, cure).replace(f". {cure}", f"; {cure}")


def _versions() -> dict[str, str]:
    found = {}
    for name in TESTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _least() -> dict[str, str]:
    """Lower bounds of our package; none for a checkout that is not installed."""
    try:
        stated = [Requirement(line) for line in metadata.requires("lit-diffusion") or []]
    except metadata.PackageNotFoundError:
        return {}
    return {
        required.name: bound.version
        for required in stated
        for bound in required.specifier
        if bound.operator == ">=" and required.marker is None
    }


def _torch_build() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip: str | None = torch.version.hip
    return f"ROCm {hip}" if hip else "CPU"


def _free(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None
