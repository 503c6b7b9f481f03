"""A patch: a class's method that loads, in front of the one that was there."""

import functools
from collections.abc import Callable
from typing import Any, Self

from shmload.integrations._building.inside import put_in_front
from shmload.integrations._redirecting.targets import LIBRARIES, Kind, method_of

Router = Callable[["Patch", type, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the patch, the class that was asked, and the arguments; returns what the call returns."""


class Patch:
    """Puts a method in front of a class's own that loads, at once and until `undo`.

    Signature, documentation and name are those of the method behind it.

    Args:
        owner: the class, which has the method of its own.
        kind: what the class loads.
        route: answers the calls.
    """

    def __init__(self, owner: type, kind: Kind, route: Router) -> None:
        self.owner = owner
        self.kind = kind
        self.method = method_of(kind)
        self.original: classmethod[Any, Any, Any] = _without_ended(vars(owner)[self.method])
        """What was there: restored by `undo`."""
        self._descriptor = classmethod(_method(self, self.original.__func__, route))
        setattr(owner, self.method, self._descriptor)

    def undo(self) -> None:
        """Restore what was there. If another patch lies on top by now, that one stays."""
        if vars(self.owner).get(self.method) is self._descriptor:
            setattr(self.owner, self.method, self.original)
        else:
            _ended[id(self._descriptor)] = self

    def call_original(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what was there, for a class."""
        return self.original.__get__(None, cls)(*args, **kwargs)

    def answers(self, cls: type) -> bool:
        """Tell whether a class has no such method between itself and this patch."""
        for each in cls.__mro__:
            if self.method in vars(each):
                return vars(each)[self.method] is self._descriptor
        return False

    @property
    def is_on_library(self) -> bool:
        """Whether what was there is the library's own code, and not another program's patch."""
        return all(
            str(_globals(function).get("__name__")).partition(".")[0] in LIBRARIES
            for function in layers(self.original.__func__)
        )

    @property
    def path_argument(self) -> str:
        """The name of the argument that says what to load."""
        innermost = layers(self.original.__func__)[-1]
        return str(innermost.__code__.co_varnames[1])


# Patches that another program's patch has outlived. When that one goes, it may put them back.
_ended: dict[int, Patch] = {}


def _without_ended(found: Any) -> Any:
    """Return what lies behind a patch that was undone, or else what was found."""
    while id(found) in _ended:
        found = _ended[id(found)].original
    return found


def _method(patch: Patch, function: Callable[..., Any], route: Router) -> Callable[..., Any]:
    @functools.wraps(function)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return route(patch, cls, args, kwargs)

    put_in_front(load, function)
    return load


def layers(function: Any) -> list[Any]:
    """Return a function and those that it wraps, the outermost first."""
    found = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        found.append(function)
    return found


def _globals(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(function, "__globals__", {})
    return found


class Patches:
    """All patches that are in force; each class has at most one."""

    def __init__(self, route: Router) -> None:
        self._route = route
        self._made: dict[type, Patch] = {}

    def add(self, owner: type, kind: Kind) -> None:
        """Patch a class, unless that was done."""
        if owner not in self._made:
            self._made[owner] = Patch(owner, kind, self._route)

    def of(self, owner: type) -> Patch | None:
        """Return a class's own patch."""
        return self._made.get(owner)

    def undo(self) -> Self:
        """Undo all."""
        while self._made:
            self._made.popitem()[1].undo()
        return self
