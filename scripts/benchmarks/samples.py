"""The statistics of interleaved rounds: medians, spreads, and ratios taken round by round."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Result = Mapping[str, float]
"""What one run measured, by name: seconds, bytes, or bytes per second, as the name's end says."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The same quantity measured several times."""

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
        """The first and the third; of a single value, that value."""
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
        """Divide round by round: what slows a whole round down drops out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))


@dataclass(frozen=True, slots=True)
class Rounds:
    """The results of several ways to do a thing, measured in turn."""

    results: Mapping[str, tuple[Result, ...]]

    def sample(self, way: str, name: str) -> Sample:
        """Return what was measured under a name for one way, one value for each round."""
        return Sample(tuple(result[name] for result in self.results[way]))


def interleave(
    ways: Mapping[str, Callable[[], Result]],
    rounds: int,
    *,
    prepare: Callable[[], None],
    announce: Callable[[str], None],
) -> Rounds:
    """Run all ways in turn, A B A B ..., after one round that does not count.

    Args:
        ways: what to run, by name.
        rounds: how many count.
        prepare: is called before each run.
        announce: is told of each round that begins.
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
