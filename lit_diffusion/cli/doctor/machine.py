"""Whether this machine can train: versions, devices, weights of FID, disk."""

import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lit_diffusion.cli.doctor.report import Finding, count, note, ok, problem, size, warning
from lit_diffusion.metrics.extractors import InceptionV3Compat

COMPROMISED = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
"""Releases with code of somebody else."""

LITTLE = 5e9
"""Free bytes of a disk below which that is told."""


def check_machine(folder: Path) -> list[Finding]:
    """All that can be told without a config; `folder`, where runs would go, need not be there."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    has_driver, memory = Path("/proc/driver/nvidia/version").exists(), Path("/dev/shm")  # noqa: S108
    there, stated = existing(folder), _stated()
    return [
        *check_versions(_installed({*stated, *COMPROMISED}), stated),
        check_devices(gpus, _torch_build(), has_driver),
        check_shared_memory(shutil.disk_usage(memory).free if memory.is_dir() else None),
        check_fid_weights(fault_of_inception()),
        check_disk(there, shutil.disk_usage(there).free),
    ]


def check_versions(
    versions: Mapping[str, str], stated: Mapping[str, SpecifierSet]
) -> list[Finding]:
    """Compare what is installed with what our package asks for."""
    found = []
    for name, have in versions.items():
        if have in COMPROMISED.get(name, ()):
            text = f"{name} {have} is a compromised release: uninstall it, change what secrets this"
            found.append(problem("versions", f"{text} machine holds, and install another."))
        elif name in stated and not stated[name].contains(have, prereleases=True):
            text = f"{name} {have} is not {stated[name]}, which works; pip install such a one."
            found.append(problem("versions", text))
    return found or [ok("versions", ", ".join(f"{n} {v}" for n, v in versions.items()))]


def check_devices(gpus: Sequence[str], torch_build: str, has_driver: bool) -> Finding:
    """Whether torch, built for "CUDA 12.8", "ROCm 6.2" or "CPU", can use the GPU that is there."""
    if gpus:
        names = ", ".join(dict.fromkeys(gpus))
        return ok("devices", f"{count(len(gpus), 'GPU')} ({names}), {torch_build}")
    if not has_driver:
        return note("devices", f"no GPU here: torch ({torch_build}) trains on the CPU.")
    why = "is built for CPUs alone; install a CUDA build of it (pytorch.org/get-started)."
    if torch_build != "CPU":
        why = f"({torch_build}) can use no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES."
    return problem("devices", f"an NVIDIA driver is here, but torch {why}")


def check_placement(device: str, wanted: str, processes: int, cores: int) -> Finding:
    """Where the processes of this node compute: on the "cpu" or on "cuda", as is `wanted`."""
    where = count(processes, "GPU") if device != "cpu" else f"{count(processes, 'process')} on CPUs"
    if device == "cpu" and processes > cores:
        text = f"{where} share {count(cores, 'core')}"
        return warning("devices", f"{text}; lower --trainer.devices, or look again where GPUs are.")
    if device == "cpu" and wanted == "auto":
        return note("devices", f"accelerator=auto finds no GPU here: {where}.")
    return ok("devices", where)


def check_shared_memory(free: int | None) -> Finding:
    """Whether loading processes can hand over batches: through /dev/shm, where there is one."""
    if free is not None and free < 2**28:
        text = f"{size(free)} are free in /dev/shm, through which loading processes hand over "
        text += "batches; start the container with --shm-size=8g, or load with num_workers: 0."
        return warning("loading", text)
    told = "" if free is None else f", {size(free)} of shared memory for them"
    return ok("loading", f"processes that load data can be started{told}")


def check_fid_weights(fault: str | None) -> Finding:
    """Whether the network of the literature's FID is there."""
    if fault is None:
        return ok("FID weights", "those of inception-v3-compat are here, with the right SHA-256")
    return note("FID weights", f"{fault} digits-cnn and patches-cnn need none.")


def check_disk(folder: Path, free: int) -> Finding:
    """Whether there is room at all."""
    told = f"{size(free)} are free in {folder}"
    return ok("disk", told) if free >= LITTLE else warning("disk", f"only {told}.")


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def fault_of_inception() -> str | None:
    """What is wrong with the weights where `inception-v3-compat` looks; None if nothing is."""
    try:
        InceptionV3Compat().check()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _installed(names: set[str]) -> dict[str, str]:
    found = {each.name.replace("_", "-"): each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(names) if name in found}


def _stated() -> dict[str, SpecifierSet]:
    """Versions that our package asks for; none for a checkout that is not installed."""
    try:
        stated = map(Requirement, metadata.requires("lit-diffusion") or [])
    except metadata.PackageNotFoundError:
        return {}
    return {each.name: each.specifier for each in stated if each.marker is None}


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
