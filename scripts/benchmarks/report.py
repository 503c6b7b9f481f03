"""The report: the machine and a table as text, and the same as JSON."""

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Sample

_PACKAGES = ("shmload", "torch", "diffusers", "transformers", "safetensors", "numpy")
_METHOD = "A B A B, one warm-up round, ratios by round; median (least to most, rounds)"
_DIGITS = {"x": ".2f", "%": ".1f", "s": ".3f", "MB": ",.0f"}


def describe_machine(gpu: Mapping[str, str]) -> dict[str, str]:
    """Return facts that influence the figures, by name.

    Args:
        gpu: facts about the GPU, for a suite that uses one.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **gpu,
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(_field('/proc/meminfo', 'MemTotal').split()[0]) / 2**20:.1f} GiB",
        "kernel": platform.release(),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def _field(path: str, name: str) -> str:
    fields = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "unknown")


def format_report(machine: Mapping[str, str], figures: Iterable[Figure]) -> str:
    """Return the whole report as text."""
    lines = [f"{name:26} {value}" for name, value in machine.items()]
    lines += [f"{'method':26} {_METHOD}", "", _row("", "reached", "to reach", "")]
    for figure in figures:
        verdict = {None: "", True: "yes", False: "NO"}[figure.is_reached]
        reached = _value(figure.sample.median, figure.sample.unit)
        lines.append(_row(figure.what, reached, figure.target or "", verdict))
        shown = {"spread": figure.sample, **figure.beside}
        lines += [f"    {label:45} {_spread(sample)}" for label, sample in shown.items()]
    return "\n".join(lines)


def format_line(facts: Iterable[str], figures: Iterable[Figure]) -> str:
    """Return facts and the figures that have a target as one line, to paste somewhere."""
    reached = (
        f"{figure.name} {_value(figure.sample.median, figure.sample.unit)}"
        for figure in figures
        if figure.target
    )
    return "; ".join((*facts, *reached))


def as_json(machine: Mapping[str, str], figures: Iterable[Figure]) -> dict[str, Any]:
    """Return the whole report as a value for `json.dump`."""
    rows = [
        {
            "name": figure.name,
            "what": figure.what,
            **_numbers(figure.sample),
            "target": figure.target,
            "reached": figure.is_reached,
            "beside": [{"what": label, **_numbers(each)} for label, each in figure.beside.items()],
        }
        for figure in figures
    ]
    return {"machine": dict(machine), "figures": rows}


def _row(what: str, reached: str, wanted: str, verdict: str) -> str:
    return f"{what:74} {reached:>12} {wanted:>12} {verdict:>8}".rstrip()


def _value(value: float, unit: str) -> str:
    return f"{value:{_DIGITS.get(unit, '.2f')}} {unit}"


def _spread(sample: Sample) -> str:
    middle, low, high = (
        _value(value, sample.unit)
        for value in (sample.median, min(sample.values), max(sample.values))
    )
    return f"{middle} ({low} to {high}, n={len(sample.values)})"


def _numbers(sample: Sample) -> dict[str, Any]:
    return {"unit": sample.unit, "median": sample.median, "values": sample.values}
