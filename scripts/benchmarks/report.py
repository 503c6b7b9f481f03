"""The report: the table as text, and the same as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.figures import Figure, Target
from benchmarks.samples import Sample

# With fewer values the report omits the quartiles.
_MIN_QUARTILES_COUNT = 8
_WIDTHS = (74, 12, 12, 8)


def format_report(machine: Mapping[str, str], figures: Iterable[Figure]) -> str:
    """Return the whole report as text."""
    lines = [f"{name:26} {value}" for name, value in machine.items()]
    lines += [
        "method                     A B A B, one warm-up round, ratios by round, page cache warm",
        "                           but in the suite `cold`; median (least to most, rounds)",
        "",
        _row("", "reached", "to reach", ""),
    ]
    floors = []
    for figure in figures:
        if figure.name.startswith("floor: "):
            floors.append(f"  {figure.what:45} {_spread(figure.sample, figure.unit)}")
            continue
        lines.append(
            _row(
                figure.what,
                format_value(figure.sample.median, figure.unit),
                _limit(figure.target, figure.unit) if figure.target else "",
                _verdict(figure),
            )
        )
        lines.append(f"    {'spread':45} {_spread(figure.sample, figure.unit)}")
        lines += [
            f"    {line.label:45} {_spread(line.sample, line.unit)}" for line in figure.beside
        ]
    if floors:
        lines += ["", "floors of this machine", *floors]
    return "\n".join(lines)


def format_line(facts: Iterable[str], figures: Iterable[Figure]) -> str:
    """Return facts and the figures that have a target as one line, to paste somewhere."""
    reached = (
        f"{figure.name} {format_value(figure.sample.median, figure.unit)}"
        for figure in figures
        if figure.target
    )
    return "; ".join((*facts, *reached))


def as_json(machine: Mapping[str, str], figures: Iterable[Figure]) -> dict[str, Any]:
    """Return the whole report as a value for `json.dump`."""
    return {
        "machine": dict(machine),
        "figures": [
            {
                "name": figure.name,
                "what": figure.what,
                **_numbers(figure.sample, figure.unit),
                "target": _limit(figure.target, figure.unit) if figure.target else None,
                "reached": figure.target and figure.target.is_reached(figure.sample.median),
                "beside": [
                    {"what": line.label, **_numbers(line.sample, line.unit)}
                    for line in figure.beside
                ],
            }
            for figure in figures
        ],
    }


def format_value(value: float, unit: str) -> str:
    """Return a number with its unit, in about three digits."""
    match unit:
        case "x":
            return f"{value:.2f} x"
        case "%":
            return f"{value:.1f} %"
        case "s":
            return f"{value:.3f} s"
        case "MB":
            return f"{value:,.0f} MB"
        case _:
            return f"{value:.2f} {unit}"


def _row(what: str, reached: str, wanted: str, verdict: str) -> str:
    cells = (what, reached, wanted, verdict)
    padded = (
        f"{cell:{'' if number == 0 else '>'}{width}}"
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return " ".join(padded).rstrip()


def _limit(target: Target, unit: str) -> str:
    return f"{'>=' if target.is_least else '<='} {target.limit:g} {unit}"


def _verdict(figure: Figure) -> str:
    if figure.target is None:
        return ""
    return "yes" if figure.target.is_reached(figure.sample.median) else "NO"


def _spread(sample: Sample, unit: str) -> str:
    median, low, high = (
        format_value(value, unit) for value in (sample.median, sample.low, sample.high)
    )
    if len(sample.values) < _MIN_QUARTILES_COUNT:
        return f"{median} ({low} to {high}, n={len(sample.values)})"
    first, third = (format_value(value, unit) for value in sample.quartiles)
    return f"{median} ({low} to {high}, half of them {first} to {third}, n={len(sample.values)})"


def _numbers(sample: Sample, unit: str) -> dict[str, Any]:
    return {
        "unit": unit,
        "median": sample.median,
        "min": sample.low,
        "max": sample.high,
        "quartiles": sample.quartiles,
        "n": len(sample.values),
        "values": sample.values,
    }
