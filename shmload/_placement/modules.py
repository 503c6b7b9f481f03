"""What a component is made of, as far as placing it needs to know: names, sizes, what stays whole.

A value without torch. `module_trees` makes it from a model, built or not.
"""

from collections.abc import Iterator

import msgspec


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """A module with those below it, or a tensor of its own that stands beside them."""

    name: str
    """The last part of its path; empty for a component itself."""
    nbytes: int
    """Size of its tensors and of all below it, in bytes; a tied tensor counts where it is first."""
    children: tuple["Module", ...] = ()
    """In the order in which they were registered, with its own tensors before them."""
    is_whole: bool = False
    """Whether its class says that it works on one device only (`_no_split_modules`)."""

    @property
    def is_piece(self) -> bool:
        """Whether a device map cannot go further down than this."""
        return self.is_whole or not self.children

    def pieces(self, path: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield the smallest modules that a device map may place, with their paths, in order."""
        if self.is_piece:
            yield path, self
            return
        for child in self.children:
            yield from child.pieces(join(path, child.name))

    @property
    def largest_leaf_nbytes(self) -> int:
        """Size of the largest module that has no others below it, in bytes.

        So much comes to a device at a time where weights wait elsewhere.
        """
        return max((child.largest_leaf_nbytes for child in self.children), default=self.nbytes)

    def has_whole(self) -> bool:
        """Tell whether this module or one below it must stay whole."""
        return self.is_whole or any(child.has_whole() for child in self.children)


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a pipeline."""

    name: str
    """In the pipeline; empty where there is none."""
    module: Module
    ties: tuple[tuple[str, ...], ...] = ()
    """Paths of modules that share a tensor, each group in order; they have to share a device."""
    runs_each_step: bool = False
    """Whether it computes at every step of a generation, and not once before or after."""

    @property
    def nbytes(self) -> int:
        """Size of its tensors, in bytes."""
        return self.module.nbytes


def join(path: str, name: str) -> str:
    """Return the path of a child."""
    return f"{path}.{name}" if path and name else path or name


def parent_of(name: str, children: tuple[Module, ...], *, is_whole: bool = False) -> Module:
    """Make a module whose tensors are all below it."""
    nbytes = sum(child.nbytes for child in children)
    return Module(name=name, nbytes=nbytes, children=children, is_whole=is_whole)
