"""Draw the README's chart from results: `chart.py docs/figures.png benchmarks/results/*.json`.

Each row has a bar for `from_pretrained`, a bar for shmload, and their ratio.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Readable for the colour-blind, on light and on dark pages (the image is white).
_OURS, _THEIRS = "#0072b2", "#9a9a9a"
_TEXT_COLOR, _SMALL_PRINT_COLOR = "#222222", "#666666"
_WIDTH_INCHES, _ROW_HEIGHT_INCHES, _FOOT_INCHES = 8.0, 1.2, 0.82
_DPI = 200  # drawn at twice the 800 pixels that a page shows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of the chart: a figure's name, and the labels of its two bars in the results."""

    figure: str
    title: str
    detail: str
    theirs: str
    ours: str
    gain: str


_ROWS = (
    _Row(
        figure="prepared",
        title="Start a program with its pipeline",
        detail="from the command, by `shmload run`, the third time and later",
        theirs="from_pretrained, the better",
        ours="shmload run",
        gain="faster",
    ),
    _Row(
        figure="attach",
        title="Load a pipeline again",
        detail="its weights are in shared memory; the call alone, after the imports",
        theirs="diffusers, the better",
        ours="shmload",
        gain="faster",
    ),
    _Row(
        figure="many-ready",
        title="Start 8 processes with the same models",
        detail="nothing in shared memory yet; until the last one is ready",
        theirs="diffusers",
        ours="a job's",
        gain="faster",
    ),
    _Row(
        figure="memory",
        title="Memory of each further process",
        detail="not shared with another process",
        theirs="diffusers",
        ours="shmload",
        gain="less",
    ),
)


def draw_chart(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the chart as a PNG.

    Args:
        path: the file to write.
        results: the output of `as_json` for each suite. Rows without a figure are left out.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figures = {figure["name"]: figure for result in results for figure in result["figures"]}
    rows = [row for row in _ROWS if row.figure in figures]
    height = _ROW_HEIGHT_INCHES * len(rows) + _FOOT_INCHES
    with mpl.rc_context({"font.size": 11, "text.color": _TEXT_COLOR}):
        drawing, axes = plt.subplots(
            len(rows), 1, figsize=(_WIDTH_INCHES, height), squeeze=False, dpi=_DPI
        )
        drawing.subplots_adjust(
            left=0.18, right=0.86, top=0.93, bottom=_FOOT_INCHES / height, hspace=0.55
        )
        for axis, row in zip(axes[:, 0], rows, strict=True):
            _draw_row(axis, row, figures[row.figure])
        drawing.text(
            0.015,
            0.02,
            _small_print(results),
            fontsize=8.5,
            color=_SMALL_PRINT_COLOR,
            linespacing=1.4,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path)
        plt.close(drawing)


def _draw_row(axis: Any, row: _Row, figure: Mapping[str, Any]) -> None:
    lines = {line["what"]: line for line in figure["beside"]}
    theirs, ours = lines[row.theirs], lines[row.ours]
    values = [theirs["median"], ours["median"]]
    bars = axis.barh(["from_pretrained", "shmload"], values, color=[_THEIRS, _OURS], height=0.7)
    axis.bar_label(bars, labels=[_amount(theirs), ""], padding=5)
    times = int(10 * values[0] / values[1]) / 10
    axis.annotate(
        f"{_amount(ours)}   {times:.0f} \N{MULTIPLICATION SIGN} {row.gain}",
        (values[1], 1),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=_OURS,
        fontweight="bold",
    )
    title = axis.set_title(row.title, loc="left", x=-0.22, fontsize=11, fontweight="bold")
    axis.annotate(
        f"  {row.detail}",
        (1, 0),
        xycoords=title,
        va="bottom",
        fontsize=9,
        color=_SMALL_PRINT_COLOR,
    )
    axis.set_xlim(0, values[0])
    axis.invert_yaxis()
    axis.xaxis.set_visible(False)
    axis.tick_params(axis="y", length=0, labelcolor=_TEXT_COLOR)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.spines["left"].set_color("#bbbbbb")


def _amount(line: Mapping[str, Any]) -> str:
    value, unit = line["median"], line["unit"]
    if unit != "s" or value >= 100:
        return f"{value:,.0f} {unit}"
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def _small_print(results: Sequence[Mapping[str, Any]]) -> str:
    machine = results[0]["machine"]
    processors = " or ".join(dict.fromkeys(result["machine"]["processor"] for result in results))
    dates = sorted({result["machine"]["date"][:10] for result in results})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        "Shorter is better. Checkpoint: Stable Diffusion 1.5's size, random weights, stored in fp32"
        " (5.5 GB), loaded in bf16.\n"
        f"Page cache warm, {machine['cores']} cores ({processors}), no GPU.\n"
        f"Medians, {when}; all values: benchmarks/results."
    )


if __name__ == "__main__":
    png, *files = sys.argv[1:]
    draw_chart(Path(png), [json.loads(Path(file).read_text()) for file in files])
