"""The context of a measurement: its checkpoints, its processes and the removal of its segments."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import shmload
from benchmarks import checkpoints, probes
from benchmarks.figures import Figure, Result, Rounds, Way, interleave
from shmload._loading.trace import Phase

_SCRIPTS = Path(__file__).parents[1]
_TIMEOUT_S = 300
# Part of each checkpoint's path; raise it when the content of one changes.
_VERSION = 1
# Variables that configure the libraries or shmload, and could make two runs differ.
_DROPPED_PREFIXES = ("DIFFUSERS_", "HF_", "SHMLOAD_", "TRANSFORMERS_")


class ProbeFailed(Exception):
    """A measured process failed; the text is its error output."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A process that has ended well."""

    output: str
    errors: str
    times: Result
    """`ready_s` to the first line, and `wall_s` to the end."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The context of a measurement."""

    work: Path
    """Directory of the checkpoints; they are made once and kept."""
    runtime: Path
    """Directory for the sockets of the measured processes; its path must be short."""
    rounds: int
    announce: Callable[[str], None]
    is_quick: bool = False
    """Whether the checkpoints are tiny, to try a suite."""

    def source(self, name: str) -> Path:
        """Return the path of a checkpoint; `checkpoints` has the names."""
        return self.work / f"{name}{'-quick' if self.is_quick else ''}-v{_VERSION}"

    def make_sources(self, names: Sequence[str]) -> None:
        """Make the missing checkpoints; each gets its name only when it is complete."""
        for name in names:
            directory = self.source(name)
            if directory.is_dir():
                continue
            self.announce(f"making {directory}")
            with tempfile.TemporaryDirectory(dir=self.work, prefix="unfinished-") as folder:
                made = Path(folder, directory.name)
                self.ask(checkpoints.make, name, made, self.work)
                os.rename(made, directory)

    # Processes ------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment without variables that configure the libraries.

        The caches of byte code and of shmload's rules lie below the working directory, and are
        warm, as they are for any user after the first start.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_DROPPED_PREFIXES) and name != "PYTHONDONTWRITEBYTECODE"
        }
        return kept | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPYCACHEPREFIX": str(self.work / "bytecode"),
            "SHMLOAD_CACHE_DIR": str(self.work / "rules"),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    def run(self, command: Sequence[str | Path], **variables: str) -> Ran:
        """Run a command and time it from outside.

        Raises:
            ProbeFailed: it failed, or took too long.
        """
        with tempfile.TemporaryFile("w+") as errors:
            began = time.perf_counter()
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            watchdog = threading.Timer(_TIMEOUT_S, process.kill)
            watchdog.start()
            assert process.stdout
            try:
                output = process.stdout.readline()
                ready_s = time.perf_counter() - began
                output += process.stdout.read()
                code = process.wait()
            finally:
                watchdog.cancel()
                process.kill()
                process.communicate()
            wall_s = time.perf_counter() - began
            errors.seek(0)
            said = errors.read()
        if code:
            words = " ".join(map(str, command))[:200]
            raise ProbeFailed(f"{words} ended with {code} after {wall_s:.0f} s:\n{said}")
        return Ran(output, said, {"ready_s": ready_s, "wall_s": wall_s})

    def python(self, code: str, source: object = "", **variables: str) -> Way:
        """Return what times `python -c`, with the path of a source in the code."""
        command = [sys.executable, "-c", code.format(source=str(source))]
        return lambda: self.run(command, **variables).times

    def ask(self, function: Callable[..., Any], /, *arguments: object, **variables: str) -> Any:
        """Run a function of a suite in a fresh process and return its JSON value.

        Args:
            function: of a module; it prints nothing after its result.
            arguments: of the function; paths become text.
            variables: of the environment, in addition to `environment`.
        """
        path = os.pathsep.join(filter(None, [str(_SCRIPTS), os.getenv("PYTHONPATH")]))
        command = probes.command_of(function, *arguments)
        ran = self.run(command, **{"PYTHONPATH": path} | variables)
        return json.loads(ran.output.splitlines()[-1])  # the libraries may print before

    def probe(self, function: Callable[..., Any], /, *arguments: object, **variables: str) -> Way:
        """Return what runs a function as `ask` does."""
        return partial(self.ask, function, *arguments, **variables)

    def measure(
        self, ways: Mapping[str, Way], *sources: Path, factor: int = 1, is_cold: bool = False
    ) -> Rounds:
        """Run all ways in turn; read the sources' files before each run, or have them forgotten.

        Some machines drop pages from the page cache after a minute without use.
        """
        files = [file for source in sources for file in weight_files(source)]
        prepare = partial(_drop_page_cache if is_cold else _fill_page_cache, files)
        rounds = self.rounds * factor
        return interleave(ways, rounds, prepare=prepare, announce=self.announce)

    def load(self, kind: str, way: str, small: Path, source: Path, **variables: str) -> Way:
        """Return what loads a source in bfloat16 in a fresh process; see `probes.attach`.

        For shmload, what the same load has kept before is in memory.
        """
        run = self.probe(probes.attach, kind, way, small, source, **variables)
        if way != "shmload":
            return run

        def attach() -> Result:
            if not self.resident(source):
                run()
            return run()

        return attach

    # Segments -------------------------------------------------------------------------------------

    def warm(self, source: Path, *options: str) -> None:
        """Make a source resident in bfloat16."""
        command = [sys.executable, "-m", "shmload", "warm", source, "--dtype", "bfloat16"]
        self.run([*command, *options])

    def decode(self, source: Path, workers: int | None = None) -> Result:
        """Decode a source to bfloat16, and forget it; measured from the first piece to the last.

        Args:
            source: nothing of it may be resident.
            workers: their number; None for the usual one.
        """
        path = self.runtime / "trace.json"
        path.unlink(missing_ok=True)
        options = [] if workers is None else ["--workers", str(workers)]
        self.warm(source, *options, "--trace", str(path))
        self.evict()
        pieces = [event for event in json.loads(path.read_text()) if event["name"] == Phase.READ]
        begin = min(each["ts"] for each in pieces)
        end = max(each["ts"] + each["dur"] for each in pieces)
        return {"bytes_per_s": weights_nbytes(source) / (end - begin) * 1e6}

    def resident(self, source: Path | None = None) -> list[str]:
        """Return the names of the segments that this program made resident, or of one source."""
        root = f"{source or self.work}{os.sep}"
        return [info.name for info in shmload.segments() if info.source.startswith(root)]

    def evict(self) -> None:
        """Remove the segments that this program made resident, and no others."""
        if names := self.resident():  # all at once: what a load has built goes before its weights
            shmload.evict(*names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Measurements that run together, and what they need."""

    measures: Mapping[str, Callable[[Bench], list[Figure]]]
    """By their name for `--only`, in the order of the table."""
    sources: Sequence[str]
    """Names of checkpoints; one that another is made from comes before it."""
    disk_gb: float
    shm_gb: float
    """Most that is resident in /dev/shm at a time."""
    memory_gb: float
    """For the page cache, the segments or a private copy of them, and the rest."""


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files below a directory, sorted by path."""
    suffixes = ("safetensors", "bin", "gguf")
    return sorted(path for suffix in suffixes for path in directory.rglob(f"*.{suffix}"))


def weights_nbytes(*directories: Path) -> int:
    """Return the size of the weight files below some directories."""
    return sum(path.stat().st_size for each in directories for path in weight_files(each))


def _fill_page_cache(paths: list[Path]) -> None:
    """Read files, so that no measurement waits for the disk."""
    buffer = memoryview(bytearray(8 << 20))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop_page_cache(paths: list[Path]) -> None:
    """Have the kernel forget files, so that a measurement reads them from the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file)  # what is not on the disk yet cannot be forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
