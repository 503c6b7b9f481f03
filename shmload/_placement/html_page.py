"""A placement as a page for browsers: bars for devices, blocks for modules, arrows for what moves.

Guarantee: the page needs no other file and no script; its tables say in words all that it draws.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from shmload._placement.device_use import DeviceUse
from shmload._placement.flows import Cut, Travel, cuts, travels
from shmload._placement.html_style import COLORS, STYLE
from shmload._placement.inventory import CPU, DISK, META, OFFLOAD
from shmload._placement.pages import placement_page
from shmload._placement.table import TableRow
from shmload._tables import Page, Table
from shmload._wording import format_nbytes, printing

_THICKEST_ARROW_PX = 14
_THINNEST_ARROW_PX = 2


def html_page(
    title: str,
    components: Mapping[str, str | Mapping[str, str]],
    parts: Sequence[TableRow],
    devices: Sequence[DeviceUse],
    execution_devices: Mapping[str, str],
    device_map: Mapping[str, str],
) -> str:
    """Return the page; the arguments but the title are the fields of a placement."""
    colors = {name: number % COLORS for number, name in enumerate(components)}
    moving, turning = travels(parts), cuts(components, execution_devices)
    accelerators = [use.limit_nbytes or 0 for use in devices if use.device not in (CPU, DISK)]
    widest = max(accelerators, default=0)
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=sum>{_sum(devices, moving, turning)}</p>",
        *(_device(use, _there(parts, use.device), colors, widest) for use in devices),
        _nowhere(parts, colors),
        _travels(moving),
        _cuts(turning),
        _tables(placement_page(parts, devices, device_map), moving, turning),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(filter(None, body))}\n</main></body></html>\n"
    )


def _sum(devices: Sequence[DeviceUse], moving: Sequence[Travel], turning: Sequence[Cut]) -> str:
    """Say the placement in one sentence."""
    total = sum(use.nbytes for use in devices)
    used = sum(use.nbytes > 0 for use in devices)
    step = sum(each.nbytes for each in moving if each.is_each_step)
    once = sum(each.nbytes for each in moving if not each.is_each_step)
    said = [f"{format_nbytes(total)} of weights on {used} device{'s' * (used != 1)}"]
    if step:
        said.append(f"{format_nbytes(step)} travel at every step")
    if once:
        said.append(f"{format_nbytes(once)} travel once in a generation")
    if not moving:
        said.append("no weights travel")
    said.append(f"{len(turning) or 'no'} cut{'s' * (len(turning) != 1)}")
    return _text("; ".join(said) + ".")


# Devices ------------------------------------------------------------------------------------------


def _there(parts: Sequence[TableRow], device: str) -> list[TableRow]:
    return [part for part in parts if (CPU if part.device == OFFLOAD else part.device) == device]


def _device(
    use: DeviceUse, there: Sequence[TableRow], colors: Mapping[str, int], widest: int
) -> str:
    """Return a device: its bar, and a list of what is in it.

    Args:
        use: the device.
        there: the modules on it.
        colors: number of the color of each component.
        widest: size of the largest accelerator, whose bar has the whole width, in bytes.
    """
    whole = max(use.limit_nbytes or 0, use.nbytes + use.passing_nbytes) or 1
    is_host = use.device in (CPU, DISK)
    width = 100.0 if is_host or not widest else max(100 * whole / widest, 8)
    rest = whole - use.nbytes - use.passing_nbytes if use.limit_nbytes else 0
    headroom = min(use.headroom_nbytes, rest)
    blocks = [
        _block(f"c{colors[part.component]}", part.nbytes, whole, _short(part)) for part in there
    ]
    blocks.append(_block("passing", use.passing_nbytes, whole, "passing"))
    blocks.append(_block("free", rest - headroom, whole, "free"))
    blocks.append(_block("headroom", headroom, whole, "headroom"))
    amounts = [
        ("weights", use.nbytes),
        ("passing", use.passing_nbytes),
        ("headroom", headroom),
        ("free", rest - headroom),
    ]
    said = ", ".join(f"{name} {format_nbytes(n)}" for name, n in amounts if n)
    size = "no limit" if use.limit_nbytes is None else format_nbytes(use.limit_nbytes)
    name = _text(use.device)
    return (
        f'<section class=device id="{name}"><h2>{name} <small>{_text(size)}</small></h2>'
        f'<div class=bar role=img style="width:{width:.2f}%" aria-label="{_text(said or "empty")}">'
        f"{''.join(blocks)}</div>"
        f"<p class=amounts>{_text(said or 'nothing')}</p>{_legend(there, colors)}</section>"
    )


def _block(kind: str, nbytes: int, whole: int, label: str) -> str:
    if nbytes <= 0:
        return ""
    share = 100 * nbytes / whole
    return (
        f'<div class="block {kind}" style="flex-basis:{share:.3f}%" '
        f'title="{_text(label)}, {format_nbytes(nbytes)}"><span>{_text(label)}</span></div>'
    )


def _legend(there: Iterable[TableRow], colors: Mapping[str, int]) -> str:
    rows = "".join(
        f"<li><i class=c{colors[part.component]}></i><b>{_text(part.component or 'the model')}</b> "
        f"{_text(part.modules or 'all')} <span class=size>{format_nbytes(part.nbytes)}</span>"
        f"{_wait(part)}</li>"
        for part in there
    )
    return f"<ul class=legend>{rows}</ul>" if rows else ""


def _wait(part: TableRow) -> str:
    if part.device == part.execution_device:
        return ""
    return f" <em>waits, computes on {_text(part.execution_device)}</em>"


def _short(part: TableRow) -> str:
    """Name modules in a block: as short as tells them apart in their component."""
    return f"{part.component} {part.modules}".strip() or "the model"


def _nowhere(parts: Sequence[TableRow], colors: Mapping[str, int]) -> str:
    """Return what has no weights at all."""
    there = _there(parts, META)
    if not there:
        return ""
    heading = "<h2>meta <small>no weights</small></h2>"
    return f"<section class=device>{heading}{_legend(there, colors)}</section>"


# Arrows -------------------------------------------------------------------------------------------


def _travels(moving: Sequence[Travel]) -> str:
    if not moving:
        return ""
    most = max(each.nbytes for each in moving)
    rows = []
    for is_each_step, heading in ((True, "At every step"), (False, "Once in a generation")):
        some = [each for each in moving if each.is_each_step is is_each_step]
        if some:
            arrows = "".join(
                _arrow(
                    each.source,
                    each.target,
                    f"{each.name}, {format_nbytes(each.nbytes)}",
                    _thickness(each.nbytes, most),
                )
                for each in some
            )
            rows.append(f"<h3>{heading}</h3><ul class=arrows>{arrows}</ul>")
    return f"<section><h2>Weights that travel</h2>{''.join(rows)}</section>"


def _cuts(turning: Sequence[Cut]) -> str:
    if not turning:
        return ""
    arrows = "".join(
        _arrow(cut.source, cut.target, _at(cut), _THINNEST_ARROW_PX) for cut in turning
    )
    return (
        "<section><h2>Cuts</h2><p>Activations go to another device here.</p>"
        f"<ul class=arrows>{arrows}</ul></section>"
    )


def _at(cut: Cut) -> str:
    component = cut.component or "the model"
    return f"{component}, to {cut.at}" if cut.at else f"{component}, back at its end"


def _arrow(source: str, target: str, label: str, thickness: int) -> str:
    return (
        f"<li><span class=end>{_text(source)}</span>"
        f"<span class=way><span>{_text(label)}</span>"
        f'<span class=line style="--thick:{thickness}px" role=img aria-label="to"></span></span>'
        f"<span class=end>{_text(target)}</span></li>"
    )


def _thickness(nbytes: int, most: int) -> int:
    """Return how thick an arrow is, in pixels: its area in proportion to the bytes."""
    return max(_THINNEST_ARROW_PX, round(_THICKEST_ARROW_PX * math.sqrt(nbytes / (most or 1))))


# Tables -------------------------------------------------------------------------------------------


def _tables(page: Page, moving: Sequence[Travel], turning: Sequence[Cut]) -> str:
    """Return the same facts in words: the tables of the command line, and those of the arrows."""
    modules, _, devices, _, code = page.blocks
    named: list[tuple[str, Table | str]] = [("Modules", modules), ("Devices", devices)]
    if moving:
        rows = [
            (
                each.name,
                format_nbytes(each.nbytes),
                each.source,
                each.target,
                "every step" if each.is_each_step else "once",
            )
            for each in moving
        ]
        titles = ("WEIGHTS", "SIZE", "FROM", "TO", "WHEN")
        named.append(("Weights that travel", Table(titles=titles, rows=rows, right=(1,))))
    if turning:
        at = [
            (cut.component or "-", cut.at or "its end", cut.source, cut.target) for cut in turning
        ]
        named.append(("Cuts", Table(titles=("COMPONENT", "AT", "FROM", "TO"), rows=at)))
    named.append(("Device map", code))
    shown = "".join(
        f"<h3>{name}</h3><div class=wide tabindex=0>{Page((block,)).html()}</div>"
        for name, block in named
    )
    return f"<section><h2>In words</h2>{shown}</section>"


def _text(text: str) -> str:
    """Write a text into HTML, in an element or in a quoted attribute."""
    return html.escape(printing(text))
