"""What the table is made of: numbers, and what they are to reach."""

from dataclasses import dataclass

from benchmarks.samples import Sample


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is to reach."""

    limit: float
    is_least: bool = False
    """Whether the figure is to be at least the limit, else at most."""

    def is_reached(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A number beside a figure."""

    label: str
    sample: Sample
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that the issue asks for; without a target it is there for information."""

    name: str
    what: str
    sample: Sample
    unit: str
    target: Target | None = None
    beside: tuple[Line, ...] = ()

    def line(self, label: str) -> Line:
        return next(line for line in self.beside if line.label == label)
