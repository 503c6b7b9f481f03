"""Measured numbers: rounds in turn, their medians and spreads, and rows with targets."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Result = Mapping[str, float]
"""The values of one run by name; the name's end is the unit: `_s`, `nbytes`, `bytes_per_s`."""
Way = Callable[[], Result]

_UNITS = {"bytes_per_s": ("GB/s", 1e-9), "nbytes": ("MB", 1e-6), "_s": ("s", 1.0)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One quantity measured several times."""

    values: tuple[float, ...]
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def scaled(self, factor: float, unit: str | None = None) -> "Sample":
        """Multiply; the unit stays the same if none is given."""
        values = tuple(value * factor for value in self.values)
        return Sample(values, self.unit if unit is None else unit)

    def __add__(self, other: "Sample") -> "Sample":
        """Add round by round."""
        values = tuple(a + b for a, b in zip(self.values, other.values, strict=True))
        return Sample(values, self.unit)

    def __sub__(self, other: "Sample") -> "Sample":
        """Subtract round by round."""
        return self + other.scaled(-1)

    def __truediv__(self, other: "Sample") -> "Sample":
        """Divide round by round: a slow-down of a whole round cancels out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)), "x")


@dataclass(frozen=True, slots=True)
class Rounds:
    """The results of several ways, measured in turn."""

    results: Mapping[str, tuple[Result, ...]]

    def sample(self, way: str, name: str) -> Sample:
        """Return one way's values of this name, one for each round, in the unit of the name."""
        ends = (known for end, known in _UNITS.items() if name.endswith(end))
        unit, factor = next(ends, ("", 1.0))
        return Sample(tuple(result[name] * factor for result in self.results[way]), unit)

    def samples(self, name: str) -> dict[str, Sample]:
        """Return the values of each way that has this name."""
        return {way: self.sample(way, name) for way, got in self.results.items() if name in got[0]}


def interleave(
    ways: Mapping[str, Way],
    rounds: int,
    *,
    prepare: Callable[[], None],
    announce: Callable[[str], None],
) -> Rounds:
    """Run all ways in turn, A B A B ..., after one warm-up round.

    Args:
        ways: what to run, by name.
        rounds: number of rounds after the warm-up.
        prepare: called before each run.
        announce: called with a message at the start of each round.
    """
    results: dict[str, list[Result]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        announce(f"round {number} of {rounds}" if number else "warm-up round")
        for way, run in ways.items():
            prepare()
            result = run()
            if number:
                results[way].append(result)
    return Rounds({way: tuple(found) for way, found in results.items()})


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table; without a limit it is there for information."""

    name: str
    what: str
    sample: Sample
    beside: Mapping[str, Sample] = field(default_factory=dict)
    """Numbers printed below it, by their words."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str | None:
        """The limit with its unit."""
        sign, limit = (">=", self.at_least) if self.at_most is None else ("<=", self.at_most)
        return None if limit is None else f"{sign} {limit:g} {self.sample.unit}"

    @property
    def is_reached(self) -> bool | None:
        """Whether the median keeps the limit; None without one."""
        if self.at_most is not None:
            return self.sample.median <= self.at_most
        return None if self.at_least is None else self.sample.median >= self.at_least


def speed_up(
    name: str,
    what: str,
    took: Mapping[str, Sample],
    *,
    at_least: float | None = None,
    over: Iterable[str] = ("diffusers",),
    beside: Mapping[str, Sample] | None = None,
) -> Figure:
    """Return how many times as long as the first way another one takes.

    Args:
        name: of the figure.
        what: its words.
        took: the time of each way; they stand beside the figure.
        at_least: the limit.
        over: the other ways; the one with the least median counts.
        beside: what else stands there.
    """
    ours, *_ = took
    best = min(over, key=lambda way: took[way].median)
    return Figure(name, what, took[best] / took[ours], {**took, **(beside or {})}, at_least)
