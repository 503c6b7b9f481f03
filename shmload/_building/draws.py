"""The random numbers that a build takes of torch: they are drawn again for whoever gets its result.

Some constructors draw tables for parameters on the CPU that the file then replaces, such as
`torch.randn(6, width)`. The calls are recorded with their sizes and dtypes, not the numbers, so the
generator goes on as after the library's build, from whatever state.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (bool, int, float, type(None))
# They say where and how the numbers lie, which does not change them.
_OF_MEMORY = frozenset({"device", "dtype", "layout", "memory_format", "pin_memory"})


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """One random operation of torch on the CPU, with its default generator."""

    name: str
    """As in `torch.ops.aten`, with the overload."""
    dtype: str
    """Of the numbers."""
    shape: tuple[int, ...] | None
    """Of the tensor that was filled; None if the operation made its own."""
    arguments: tuple[Any, ...]
    """All others without names: numbers, and lists of them."""
    named: dict[str, Any]

    def repeat(self) -> None:
        """Draw the same amount; the numbers go nowhere."""
        name, _, overload = self.name.partition(".")
        operation = getattr(getattr(torch.ops.aten, name), overload)
        dtype = getattr(torch, self.dtype)
        arguments = [list(a) if isinstance(a, list | tuple) else a for a in self.arguments]
        if self.shape is None:
            operation(*arguments, **self.named, dtype=dtype, device="cpu")
        else:
            operation(torch.empty(self.shape, dtype=dtype, device="cpu"), *arguments, **self.named)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the random operations of a block, in one thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and (
            isinstance(made, torch.Tensor) and made.is_cpu
        ):
            self.found.append(_describe(func, made, args, kwargs))
        return made


def repeat(draws: Iterable[Draw]) -> None:
    """Draw what was drawn; the default generator goes on as if it had been for the same use."""
    with torch.no_grad():
        for draw in draws:
            draw.repeat()


def _describe(func: Any, made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    shape = None
    if args and args[0] is made:  # filled in place
        shape, args = tuple(made.shape), args[1:]
    named = {name: value for name, value in kwargs.items() if name not in _OF_MEMORY}
    name = str(func).removeprefix("aten.")
    if not (made.is_contiguous() and all(map(_is_plain, [*args, *named.values()]))):
        raise ValueError(f"it draws random numbers by {name} from more than sizes")
    return Draw(
        name=name,
        dtype=str(made.dtype).removeprefix("torch."),
        shape=shape,
        arguments=args,
        named=named,
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
