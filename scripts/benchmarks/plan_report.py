"""The report of the suite `plan`: a row for each pair of a pipeline and a rig."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.plan_measures import Pair
from shmload._placement.cost import Cost

_HEAD = ("pipeline", "rig", "each step", "once", "cuts", "fullest", "plan", "", "of the others")
_UNITS = ("", "GiB", "GiB", "GiB", "", "", "ms", "", "each step, once, cuts, fullest, ms, way")


def format_pairs(machine: Mapping[str, str], pairs: Sequence[Pair]) -> str:
    """Return the whole report as text."""
    rows = [_HEAD, _UNITS, *(_row(pair) for pair in pairs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{name:26} {value}" for name, value in machine.items()]
    lines.append("")
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    counts = _counts(pairs)
    lines += [
        "",
        f"of {len(pairs)} pairs: {counts['better']} better, {counts['equal']} equal, "
        f"{counts['worse']} worse than the best of accelerate and diffusers",
        f"slowest plan: {max(pair.our_seconds for pair in pairs) * 1000:.0f} ms",
    ]
    return "\n".join(lines)


def pairs_as_json(machine: Mapping[str, str], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the whole report as a value for `json.dump`; times in seconds, sizes in bytes."""
    return {
        "machine": dict(machine),
        "counts": dict(_counts(pairs)),
        "pairs": [
            {
                "pipeline": pair.pipeline,
                "rig": pair.rig,
                "modules": pair.modules,
                "verdict": pair.verdict,
                "ours": pair.ours._asdict() | {"seconds": pair.our_seconds},
                "best of the others": pair.theirs._asdict()
                | {"seconds": pair.their_seconds, "way": pair.their_way},
            }
            for pair in pairs
        ],
    }


def _counts(pairs: Iterable[Pair]) -> Mapping[str, int]:
    found = Counter(pair.verdict for pair in pairs)
    return {verdict: found[verdict] for verdict in ("better", "equal", "worse")}


def _row(pair: Pair) -> tuple[str, ...]:
    theirs = ", ".join(_cells(pair.theirs, pair.their_seconds))
    ours = _cells(pair.ours, pair.our_seconds)
    return pair.pipeline, pair.rig, *ours, pair.verdict, f"{theirs}, {pair.their_way}"


def _cells(cost: Cost, seconds: float) -> tuple[str, ...]:
    return (
        f"{cost.step_nbytes / 2**30:.2f}",
        f"{cost.once_nbytes / 2**30:.2f}",
        str(cost.cuts),
        f"{cost.fullest:.1%}",
        f"{seconds * 1000:.0f}",
    )
