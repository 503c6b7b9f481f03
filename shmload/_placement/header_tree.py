"""A component's modules as the names of its stored tensors tell them, without its class.

Good enough to say that a device map fits. A class may rename tensors, add some that are not stored,
and call other modules indivisible: where a map does not fit this tree, ask the class.
"""

from collections.abc import Iterable

import msgspec

from shmload._placement.modules import Component, Module, parent_of


class _Node(msgspec.Struct):
    """A module while its tree grows."""

    children: "dict[str, _Node]" = {}
    tensors: dict[str, int] = {}


def component_from_names(name: str, tensors: Iterable[tuple[str, int]]) -> Component:
    """Describe a component by its stored tensors.

    Args:
        name: name of the component in its pipeline; empty if there is none.
        tensors: dotted name and size of each, in bytes, as it will be loaded.

    Returns:
        Its modules. Numbered ones are indivisible, as blocks are in nearly all classes.
    """
    root = _Node()
    for path, nbytes in tensors:
        *above, last = path.split(".")
        node = root
        for part in above:
            node = node.children.setdefault(part, _Node())
        node.tensors[last] = nbytes
    return Component(name=name, module=_module("", root, inside=False))


def _module(name: str, node: _Node, *, inside: bool) -> Module:
    is_whole = name.isdecimal() and not inside
    if not node.children:
        return Module(name=name, nbytes=sum(node.tensors.values()), is_whole=is_whole)
    # A tensor beside submodules is placed by itself.
    own = tuple(Module(name=each, nbytes=nbytes) for each, nbytes in node.tensors.items())
    inner = tuple(
        _module(each, child, inside=inside or is_whole) for each, child in node.children.items()
    )
    return parent_of(name, (*own, *inner), is_whole=is_whole)
