"""The entries of the table: measured numbers and their targets."""

from dataclasses import dataclass

from benchmarks.samples import Sample


@dataclass(frozen=True, slots=True)
class Target:
    """The value that a figure has to reach."""

    limit: float
    is_least: bool = False
    """True: the figure must be at least the limit. False: at most."""

    def is_reached(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number printed below a figure."""

    label: str
    sample: Sample
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the table; without a target it is there for information."""

    name: str
    what: str
    sample: Sample
    unit: str
    target: Target | None = None
    beside: tuple[Line, ...] = ()

    def line(self, label: str) -> Line:
        return next(line for line in self.beside if line.label == label)
