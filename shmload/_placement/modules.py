"""A component as a tree of modules: their names, their sizes, which ones stay whole.

Plain values without torch; `module_trees` makes them from a model, built or not.
"""

from collections.abc import Iterator

import msgspec


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """A module with its children, or a tensor that a module holds beside its children."""

    name: str
    """The last name in its path; empty for a component itself."""
    nbytes: int
    """Size of its and its children's tensors, in bytes; a tied tensor counts where it is first."""
    children: tuple["Module", ...] = ()
    """In the order of registration; the module's own tensors come first."""
    is_whole: bool = False
    """Whether its library says that it works on one device only (`_no_split_modules`)."""

    @property
    def is_unit(self) -> bool:
        """Whether a device map cannot divide it further."""
        return self.is_whole or not self.children

    def units(self, path: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield the path of each unit and the unit, in order.

        Units are the smallest modules that a device map may place.
        """
        if self.is_unit:
            yield path, self
            return
        for child in self.children:
            yield from child.units(join(path, child.name))

    @property
    def largest_leaf_nbytes(self) -> int:
        """Size of the largest module without children, in bytes.

        Offloaded weights come to a device one such module at a time.
        """
        return max((child.largest_leaf_nbytes for child in self.children), default=self.nbytes)


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a pipeline."""

    name: str
    """Its name in the pipeline; empty for a model outside of a pipeline."""
    module: Module
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of paths of modules that share a tensor and so must share a device; each in order."""
    runs_each_step: bool = False
    """Whether it computes at every step of a generation, not once before or after."""

    @property
    def nbytes(self) -> int:
        """Size of its tensors, in bytes."""
        return self.module.nbytes


def join(path: str, name: str) -> str:
    """Return the path of a child; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def parent_of(name: str, children: tuple[Module, ...], *, is_whole: bool = False) -> Module:
    """Make a module that has no tensors of its own, only its children's."""
    nbytes = sum(child.nbytes for child in children)
    return Module(name=name, nbytes=nbytes, children=children, is_whole=is_whole)
