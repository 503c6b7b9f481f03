"""Functions that a constructor has defined inside itself, as parts that a pickle can hold.

Some models and processors keep such a function as an attribute: an activation, or a step of a list.
Pickle refuses them, because no name leads to them. But the constructor's code holds theirs.

Guarantee: what is restored has the same code object as if the constructor had run here, and the
values that the original had in its defaults and its closure.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

_IN_CONSTRUCTOR = ".__init__.<locals>."


class Parts(NamedTuple):
    """A function without its code."""

    module: str
    constructor: str
    """Its qualified name."""
    spot: list[int]
    """Indices into the constants of the constructor's code, and of the codes within it."""
    bytecode: bytes
    """To tell whether the code found there is the same."""
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None
    closure: tuple[types.CellType, ...] | None
    annotations: dict[str, Any]
    attributes: dict[str, Any]


def take_apart(function: types.FunctionType) -> Parts | None:
    """Return the parts of a function; None if no constructor that a name leads to has its code.

    The pickler takes cells apart itself: functions that share a variable share it again.
    """
    outer, mark, _ = function.__qualname__.partition(_IN_CONSTRUCTOR)
    if not mark or "<locals>" in outer:
        return None
    constructor = f"{outer}.__init__"
    try:
        code = _code_of(function.__module__, constructor)
    except (AttributeError, ImportError, TypeError):
        return None
    spot = next((spot for spot, each in _codes_in(code) if each is function.__code__), None)
    if spot is None or function.__globals__ is not vars(_module(function.__module__)):
        return None
    return Parts(
        module=function.__module__,
        constructor=constructor,
        spot=spot,
        bytecode=function.__code__.co_code,
        defaults=function.__defaults__,
        keyword_defaults=function.__kwdefaults__,
        closure=function.__closure__,
        annotations=function.__annotations__,
        attributes=vars(function),
    )


def put_together(
    module: str,
    constructor: str,
    spot: list[int],
    bytecode: bytes,
    defaults: tuple[Any, ...] | None,
    keyword_defaults: dict[str, Any] | None,
    closure: tuple[types.CellType, ...] | None,
    annotations: dict[str, Any],
    attributes: dict[str, Any],
) -> types.FunctionType:
    """Return a function of its parts.

    Raises:
        ValueError: the constructor is another one here.
    """
    code = _code_of(module, constructor)
    for index in spot:
        code = code.co_consts[index] if index < len(code.co_consts) else None
        if not isinstance(code, types.CodeType):
            break
    if not isinstance(code, types.CodeType) or code.co_code != bytecode:
        raise ValueError(f"{module}.{constructor} has other code here")
    made = types.FunctionType(code, vars(_module(module)), None, defaults, closure)
    made.__kwdefaults__ = keyword_defaults
    made.__annotations__ = annotations
    vars(made).update(attributes)
    return made


def content_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return what `make_cell` makes a like cell of; nothing of a variable without a value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def make_cell(*content: Any) -> types.CellType:
    """Return the cell of a variable."""
    return types.CellType(*content)


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def _code_of(module: str, name: str) -> Any:
    return inspect.unwrap(attrgetter(name)(_module(module))).__code__


def _codes_in(code: types.CodeType) -> Iterator[tuple[list[int], types.CodeType]]:
    """Yield the codes that are defined inside another one, each with its spot."""
    for index, each in enumerate(code.co_consts):
        if isinstance(each, types.CodeType):
            yield [index], each
            yield from (([index, *spot], inner) for spot, inner in _codes_in(each))
