"""The chart for the README: three questions, two bars each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Line
from benchmarks.report import format_value

# Readable on white and on a dark page's white image, and without telling red from green.
_COLORS = {"shmload": "#0072b2", "diffusers": "#9a9a9a", "imports alone": "#d9d9d9"}
_TEXT_COLOR = "#333333"
_SIZE_INCHES = (8.0, 4.3)
_DPI = 200  # drawn at twice the 800 pixels that a page shows

NEEDED = frozenset({"attach", "first-load"})
"""The measurements that the chart is made from, as `--only` calls them."""


def draw_chart(path: Path, machine: Mapping[str, str], figures: Sequence[Figure]) -> None:
    """Write the chart as a PNG.

    Args:
        path: of the file.
        machine: what `describe_machine` said.
        figures: at least those of the measurements in `NEEDED`.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = {figure.name: figure for figure in figures}
    first, attach, memory = found["first-load"], found["attach"], found["memory"]
    panels = (
        (
            "First load, nothing resident: whole process with its imports",
            {way: first.line(way) for way in ("diffusers", "shmload", "imports alone")},
        ),
        (
            "Load when the weights are resident: the call alone",
            {"diffusers": attach.line("diffusers, the better"), "shmload": attach.line("shmload")},
        ),
        (
            "Private memory of each process that loads",
            {way: memory.line(way) for way in ("diffusers", "shmload")},
        ),
    )
    with mpl.rc_context(
        {"figure.constrained_layout.h_pad": 0.08, "font.size": 11, "text.color": _TEXT_COLOR}
    ):
        drawing, axes = plt.subplots(
            len(panels),
            1,
            figsize=_SIZE_INCHES,
            gridspec_kw={"height_ratios": [len(lines) + 0.4 for _, lines in panels]},
            layout="constrained",
        )
        for axis, (title, lines) in zip(axes, panels, strict=True):
            _draw_panel(axis, title, lines)
        drawing.supxlabel(
            "Stable Diffusion 1.5, stored in fp32, wanted in bf16; page cache warm; "
            f"{machine['cores']} cores, {machine['processor']}; medians",
            fontsize=9,
            color=_TEXT_COLOR,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=_DPI)
        plt.close(drawing)


def _draw_panel(axis: Any, title: str, lines: Mapping[str, Line]) -> None:
    values = [line.sample.median for line in lines.values()]
    bars = axis.barh(list(lines), values, color=[_COLORS[way] for way in lines], height=0.72)
    axis.bar_label(bars, labels=[_label(line) for line in lines.values()], padding=5)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_TEXT_COLOR)
    axis.set_xlim(0, max(values) * 1.16)
    axis.invert_yaxis()
    axis.xaxis.set_visible(False)
    axis.tick_params(axis="y", length=0, labelcolor=_TEXT_COLOR)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.spines["left"].set_color("#bbbbbb")


def _label(line: Line) -> str:
    value = line.sample.median
    return f"{value:.2f} s" if line.unit == "s" else format_value(value, line.unit)
