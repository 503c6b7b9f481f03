"""The statistics of interleaved rounds: medians, spreads, and ratios taken round by round."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Result = Mapping[str, float]
"""The values of one run by name; the name's suffix is the unit: `_s`, `_nbytes`, `bytes_per_s`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One quantity measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; for a single value, that value twice."""
        if len(self.values) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    def scaled(self, factor: float) -> "Sample":
        return Sample(tuple(value * factor for value in self.values))

    def __add__(self, other: "Sample") -> "Sample":
        """Add round by round."""
        return Sample(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: "Sample") -> "Sample":
        """Subtract round by round."""
        return Sample(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def __truediv__(self, other: "Sample") -> "Sample":
        """Divide round by round: a slow-down of a whole round cancels out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


@dataclass(frozen=True, slots=True)
class Rounds:
    """The results of several ways, measured in turn."""

    results: Mapping[str, tuple[Result, ...]]

    def sample(self, way: str, name: str) -> Sample:
        """Return one way's values of this name, one for each round."""
        return Sample(tuple(result[name] for result in self.results[way]))


def interleave(
    ways: Mapping[str, Callable[[], Result]],
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
