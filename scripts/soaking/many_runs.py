#!/usr/bin/env python3
"""Run a program many times by `shmload run`, and look what that leaves behind.

The template may hold no more descriptors, threads, children, zombies, files and names than after
the first runs, and memory of one arena (1 MiB) more. Exit code 1 if it holds more.

    .venv/bin/python scripts/soaking/many_runs.py --runs 1000
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

_PROGRAMS = (
    "pass",
    "import json, sys; sys.exit(json.loads('3'))",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'pass'])",
    "raise ValueError",
)
_FIRST_RUNS = 20
_SETTLE_TIMEOUT_S = 20.0
# Python takes memory in pieces of 1 MiB (an arena), each a mapping.
_SLACK = {"memory kB": 1024, "mappings": 1}


@click.command(help=__doc__)
@click.option("--runs", default=1000, show_default=True, type=click.IntRange(min=_FIRST_RUNS + 1))
@click.option("--import", "modules", multiple=True, help="Of the template, instead of the usual.")
def main(runs: int, modules: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="runs-", dir="/tmp") as folder:
        environment = os.environ | {"XDG_RUNTIME_DIR": folder}
        pid = _start(modules, environment)
        before, names = {}, set()
        ordinary = 0
        for number in range(runs):
            if number == _FIRST_RUNS:
                before, names = _settled(pid), _names(folder)
            ordinary += _run(_PROGRAMS[number % len(_PROGRAMS)], environment)
        after = _settled(pid, before)
        new = sorted(_names(folder) - names)
        _shmload(["template", "stop"], environment)
    click.echo(f"{runs} runs, {ordinary} of them in the ordinary way")
    for name, value in after.items():
        click.echo(f"{name:12} {before[name]:>12} then {value:>12}")
    click.echo(f"new names    {' '.join(new) or 'none'}")
    grown = [name for name, value in after.items() if _is_more(name, before[name], value)]
    sys.exit(1 if grown or new or ordinary else 0)


def _start(modules: tuple[str, ...], environment: dict[str, str]) -> int:
    imports = [f"--import={name}" for name in modules]
    started = _shmload(["template", "warm", "--json", *imports], environment)
    return int(json.loads(started.stdout)["template"]["pid"])


def _run(code: str, environment: dict[str, str]) -> int:
    """Run a program; return 1 if Python ran it in the ordinary way."""
    ended = _shmload(["run", "-v", "-c", code], environment, check=False)
    return int("in the ordinary way" in ended.stderr)


def _shmload(
    words: list[str], environment: dict[str, str], *, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shmload", *words]
    return subprocess.run(command, env=environment, check=check, capture_output=True, text=True)


def _settled(pid: int, wanted: dict[str, int] | None = None) -> dict[str, int]:
    """Return what a template holds, once it has reaped its programs."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        found = _held(pid)
        is_quiet = found["zombies"] == 0 and found["children"] == 1
        if wanted:
            is_quiet = not any(_is_more(name, wanted[name], value) for name, value in found.items())
        if is_quiet or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _held(pid: int) -> dict[str, int]:
    process = Path(f"/proc/{pid}")
    children = (process / f"task/{pid}/children").read_text().split()
    states = [_state_of(child) for child in children]
    rollup = (process / "smaps_rollup").read_text().splitlines()
    # Not the private pages: a page is private or shared by what the newest copy has written.
    memory = sum(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "children": len(children),
        "zombies": states.count("Z"),
        "mappings": len((process / "maps").read_text().splitlines()),
        "memory kB": memory,
    }


def _state_of(child: str) -> str:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _names(folder: str) -> set[str]:
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return shared | {str(path) for path in Path(folder).rglob("*")}


def _is_more(name: str, before: int, after: int) -> bool:
    return after > before + _SLACK.get(name, 0)


if __name__ == "__main__":
    main()
