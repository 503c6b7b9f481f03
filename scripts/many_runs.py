#!/usr/bin/env python3
"""Run a program many times by `shmload run`, and look what that leaves behind.

The template may hold no more descriptors, threads, children, zombies, files and names than after
the first runs, and memory of one arena (1 MiB) more. Exit code 1 if it holds more.

    .venv/bin/python scripts/many_runs.py --runs 1000
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import click
from proc import children, open_files, stat_of
from soaking.place import Place

from shmload._host.procfs import rollup_nbytes

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
        place = Place(Path(folder))
        pid = _start(modules, place)
        before, names = {}, set()
        ordinary = 0
        for number in range(runs):
            if number == _FIRST_RUNS:
                before, names = _settled(pid), _names(place.folder)
            ordinary += _run(_PROGRAMS[number % len(_PROGRAMS)], place)
        after = _settled(pid, before)
        new = sorted(_names(place.folder) - names)
        place.shmload("template", "stop")
    click.echo(f"{runs} runs, {ordinary} of them in the ordinary way")
    for name, value in after.items():
        click.echo(f"{name:12} {before[name]:>12} then {value:>12}")
    click.echo(f"new names    {' '.join(new) or 'none'}")
    grown = [name for name, value in after.items() if _is_more(name, before[name], value)]
    sys.exit(1 if grown or new or ordinary else 0)


def _start(modules: tuple[str, ...], place: Place) -> int:
    imports = [f"--import={name}" for name in modules]
    started = place.python("-m", "shmload", "template", "warm", "--json", *imports)
    return int(json.loads(started)["template"]["pid"])


def _run(code: str, place: Place) -> int:
    """Run a program; return 1 if Python ran it in the ordinary way."""
    ended = place.shmload("run", "-v", "-c", code)
    return int("in the ordinary way" in ended.stderr)


def _settled(pid: int, wanted: dict[str, int] | None = None) -> dict[str, int]:
    """Return what a template holds, once it has reaped its programs."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        found = _held(pid)
        is_quiet = found["zombies"] == found["children"] == 0
        if wanted:
            is_quiet = not any(_is_more(name, wanted[name], value) for name, value in found.items())
        if is_quiet or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _held(pid: int) -> dict[str, int]:
    below = children(pid)
    stats = [stat_of(child) for child in below]
    return {
        "descriptors": len(open_files(pid)),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "children": len(below),
        "zombies": sum(stat is not None and stat.state == "Z" for stat in stats),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        # Not the private pages: a page is private or shared by what the newest copy has written.
        "memory kB": rollup_nbytes(pid, "Anonymous:") >> 10,
    }


def _names(folder: Path) -> set[str]:
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return shared | {str(path) for path in (folder / "run").rglob("*")}


def _is_more(name: str, before: int, after: int) -> bool:
    return after > before + _SLACK.get(name, 0)


if __name__ == "__main__":
    main()
