"""The report: the table as text, and the same as JSON."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.figures import Figure, Sample

# With fewer values the report omits the quartiles.
_MIN_QUARTILES_COUNT = 8
_METHOD = """\
method                     A B A B, one warm-up round, ratios by round, page cache warm
                           but in the suite `cold`; median (least to most, rounds)
"""
_DIGITS = {"x": ".2f", "%": ".1f", "s": ".3f", "MB": ",.0f"}


def format_report(machine: Mapping[str, str], figures: Iterable[Figure]) -> str:
    """Return the whole report as text."""
    lines = [f"{name:26} {value}" for name, value in machine.items()]
    lines += [_METHOD, _row("", "reached", "to reach", "")]
    floors = []
    for figure in figures:
        if figure.name.startswith("floor: "):
            floors.append(f"  {figure.what:45} {_spread(figure.sample)}")
            continue
        verdict = {None: "", True: "yes", False: "NO"}[figure.is_reached]
        lines.append(_row(figure.what, _median(figure.sample), figure.target or "", verdict))
        shown = {"spread": figure.sample, **figure.beside}
        lines += [f"    {label:45} {_spread(sample)}" for label, sample in shown.items()]
    if floors:
        lines += ["", "floors of this machine", *floors]
    return "\n".join(lines)


def format_line(facts: Iterable[str], figures: Iterable[Figure]) -> str:
    """Return facts and the figures that have a target as one line, to paste somewhere."""
    reached = (f"{figure.name} {_median(figure.sample)}" for figure in figures if figure.target)
    return "; ".join((*facts, *reached))


def as_json(machine: Mapping[str, str], figures: Iterable[Figure]) -> dict[str, Any]:
    """Return the whole report as a value for `json.dump`."""
    return {
        "machine": dict(machine),
        "figures": [
            {
                "name": figure.name,
                "what": figure.what,
                **_numbers(figure.sample),
                "target": figure.target,
                "reached": figure.is_reached,
                "beside": [
                    {"what": label, **_numbers(sample)} for label, sample in figure.beside.items()
                ],
            }
            for figure in figures
        ],
    }


def _row(what: str, reached: str, wanted: str, verdict: str) -> str:
    return f"{what:74} {reached:>12} {wanted:>12} {verdict:>8}".rstrip()


def _value(value: float, unit: str) -> str:
    return f"{value:{_DIGITS.get(unit, '.2f')}} {unit}"


def _median(sample: Sample) -> str:
    return _value(sample.median, sample.unit)


def _spread(sample: Sample) -> str:
    low, high, first, third = (
        _value(value, sample.unit)
        for value in (min(sample.values), max(sample.values), *sample.quartiles)
    )
    count = len(sample.values)
    half = f", half of them {first} to {third}" if count >= _MIN_QUARTILES_COUNT else ""
    return f"{_median(sample)} ({low} to {high}{half}, n={count})"


def _numbers(sample: Sample) -> dict[str, Any]:
    return {
        "unit": sample.unit,
        "median": sample.median,
        "min": min(sample.values),
        "max": max(sample.values),
        "quartiles": sample.quartiles,
        "n": len(sample.values),
        "values": sample.values,
    }
