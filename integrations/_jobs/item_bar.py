"""The progress bar of a job, counted in items."""

import sys
from collections.abc import Iterable, Sized
from typing import Any, Self


class ItemBar:
    """A bar of items, or no bar; a context that closes it.

    Args:
        items: their length is the bar's total, if they have one.
        progress: whether there is a bar; None for one if stderr is a terminal.
    """

    def __init__(self, items: Iterable[Any], progress: bool | None) -> None:
        self._bar: Any = None
        if progress is None:
            progress = sys.stderr is not None and sys.stderr.isatty()
        if progress:
            from tqdm import tqdm

            total = len(items) if isinstance(items, Sized) else None
            self._bar = tqdm(total=total, unit="item")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        """Count one more item."""
        if self._bar is not None:
            self._bar.update()
