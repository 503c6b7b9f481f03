"""How amounts and names are written in errors, tables and logs."""

from collections.abc import Collection, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging


def format_nbytes(nbytes: float) -> str:
    """Write a size in bytes for errors and tables, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def format_age(elapsed_s: float) -> str:
    """Write how long ago something was, such as `12 s`, `5 min`, `3 h` or `2 days`."""
    return format_time(elapsed_s, most=1)


def format_time(left_s: float, *, most: int = 2) -> str:
    """Write how long something lasts, in one or two units, such as `1 h 59 min`; never too long.

    Args:
        left_s: in seconds; below 0 if the clock was set back.
        most: how many units at most.
    """
    left = max(0, int(left_s))
    if left < 60:
        return f"{left} s"
    hours, minutes = divmod(left // 60, 60)
    days, hours = divmod(hours, 24) if hours >= 48 else (0, hours)
    units = (("days", days), ("h", hours), ("min", minutes))
    words = [f"{number} {unit}" for unit, number in units if number]
    return " ".join(words[:most])


def count_of(number: int, one: str, several: str | None = None) -> str:
    """Write a number with its noun, such as `1 segment` or `2 segments`."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def encodable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode: lone surrogates, from bytes in a path."""
    return text.encode("utf-8", "backslashreplace").decode()


def printing(text: str) -> str:
    """Escape what does not print in a text: newlines, what steers a terminal, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def logger_of(name: str) -> "logging.Logger":
    """Return a logger of this package, which escapes what would steer a terminal in its lines."""
    import logging  # 5 ms, which an import of shmload does not pay

    logger = logging.getLogger(name)
    logger.addFilter(_escape_record)  # once: a function is equal to itself
    return logger


def _escape_record(record: "logging.LogRecord") -> bool:
    """Escape what does not print in a record's text, before a handler of any kind has it."""
    record.msg, record.args = printing(record.getMessage()), None
    return True


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an error: the known name most like this one; empty if none is.

    Capitals do not count.
    """
    import difflib  # 2 ms, which an import of shmload or a worker's start does not pay

    by_lower = {each.lower(): each for each in reversed(known)}
    found = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found and not name.isdecimal() else ""


def listed(names: Sequence[str]) -> str:
    """List names; consecutive numbers from 0 become a range."""
    if len(names) > 2 and list(names) == [str(number) for number in range(len(names))]:
        return f"0 to {len(names) - 1}"
    return ", ".join(names)


def name_processes(pids: Collection[int]) -> str:
    """Name processes by their ids; "some process" if none is known."""
    if not pids:
        return "some process"
    return f"process{'' if len(pids) == 1 else 'es'} {' and '.join(map(str, sorted(pids)))}"
