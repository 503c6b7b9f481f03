"""Describe the machine and the libraries that a measurement ran on."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shmload import __version__

_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "ml_dtypes",
    "xxhash",
)
_REPOSITORY = Path(__file__).resolve().parents[2]


def describe_machine(gpu: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return facts that influence the figures, by name.

    Args:
        gpu: facts about the GPU, for a suite that uses one.
    """
    return dict(gpu or {}) | {
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(_field(Path('/proc/meminfo'), 'MemTotal').split()[0]) / 2**20:.1f} GiB",
        "kernel": platform.release(),
        "huge pages": f"private {_chosen('enabled')}, shared {_chosen('shmem_enabled')}",
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "packages": ", ".join(
            [f"shmload {__version__}", *(f"{name} {_version_of(name)}" for name in _PACKAGES)]
        ),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(version unknown)"


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _chosen(name: str) -> str:
    try:
        policy = Path("/sys/kernel/mm/transparent_hugepage", name).read_text()
    except OSError:
        return "unknown"
    return policy.partition("[")[2].partition("]")[0]


def _commit() -> str:
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
