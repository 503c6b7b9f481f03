"""The context of a measurement: sources, processes, number of rounds, and clean-up."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import shmload
from benchmarks.processes import Processes
from benchmarks.samples import Result, Rounds, interleave
from benchmarks.sources import Sources, fill_page_cache, weight_files


@dataclass(frozen=True, slots=True)
class Bench:
    """The context of a measurement."""

    sources: Sources
    processes: Processes
    rounds: int
    announce: Callable[[str], None]

    def measure(
        self, ways: dict[str, Callable[[], Result]], *sources: Path, factor: int = 1
    ) -> Rounds:
        """Run all ways in turn; read the sources' files before each run.

        Some machines drop pages from the page cache after a minute without use.
        """
        files = [file for source in sources for file in weight_files(source)]
        return interleave(
            ways,
            self.rounds * factor,
            prepare=partial(fill_page_cache, files),
            announce=self.announce,
        )

    def code(self, template: str, source: object = "") -> Callable[[], Result]:
        return partial(self.processes.time_code, template.format(source=str(source)))

    def probe(self, name: str, *arguments: object, **variables: str) -> Callable[[], Result]:
        return partial(self.processes.probe, name, *arguments, **variables)

    def resident(self) -> set[str]:
        """Return the names of the segments that this program made resident."""
        root = f"{self.sources.work}{os.sep}"
        return {info.name for info in shmload.segments() if info.source.startswith(root)}

    def evict(self) -> None:
        """Remove the segments that this program made resident, and no others."""
        for name in self.resident():
            shmload.evict(name)
