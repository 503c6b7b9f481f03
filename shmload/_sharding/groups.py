"""Which modules of a model FSDP shards as one group, gathered and freed together.

Guarantee: a tied parameter is in one group. A group has parameters of one dtype, as FSDP2 wants,
unless one module itself has several.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from shmload._building.module_trees import whole_classes
from shmload._wording import listed, nearest
from shmload.errors import ArgumentError

Blocks = Iterable[str | type[nn.Module]]
"""Classes of modules, or their names."""


def find_groups(model: nn.Module, blocks: Blocks | None = None) -> list[nn.Module]:
    """Return one module for each group, inner groups before outer ones.

    A group has the parameters of its module, without those of the groups inside.

    Args:
        model: any module; the last group.
        blocks: classes whose modules are groups; None for the classes that the model calls
            indivisible (`_no_split_modules`). A block that shares a parameter with another group
            is no group, because sharding would make two parameters of it. If a block or the model
            has parameters of several dtypes, modules in it become groups too.

    Raises:
        ArgumentError: the model has no module of a class; or one module itself has parameters of
            several dtypes, and some are trained.
    """
    chosen = _without_shared(model, _find_blocks(model, blocks))
    mixed = [model, *chosen]
    while mixed:
        leaving = _leaving(model, mixed.pop(), chosen)
        chosen.update(leaving)
        mixed.extend(leaving)
    return [module for module in _inside_out(model, set()) if module in chosen or module is model]


def _find_blocks(model: nn.Module, blocks: Blocks | None) -> set[nn.Module]:
    """Return the modules of some classes that have parameters."""
    there = [
        module
        for module in model.modules()
        if module is not model and next(module.parameters(), None) is not None
    ]
    if blocks is None:
        names: Collection[str] = whole_classes(model)
        return {module for module in there if type(module).__name__ in names}
    found = set()
    for block in blocks:
        of_it = {module for module in there if _is_of(module, block)}
        if not of_it:
            known = sorted({type(module).__name__ for module in there})
            name = block if isinstance(block, str) else block.__name__
            raise ArgumentError(
                f"{type(model).__name__} has no module of class {name}; it has "
                f"{listed(known)}{nearest(name, known)}"
            )
        found |= of_it
    return found


def _is_of(module: nn.Module, block: str | type[nn.Module]) -> bool:
    if isinstance(block, str):
        return type(module).__name__ == block
    return isinstance(module, block)


def _inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules, each after the modules in it."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _inside_out(child, seen)
    yield module


# Ties ---------------------------------------------------------------------------------------------


def _without_shared(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Return the chosen modules that share no parameter with another group."""
    while True:
        groups: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
        _note_groups(model, model, chosen, groups)
        cut = {group for found in groups.values() if len(found) > 1 for group in found} - {model}
        if not cut:
            return chosen
        chosen = chosen - cut


def _note_groups(
    module: nn.Module,
    group: nn.Module,
    chosen: Collection[nn.Module],
    groups: dict[nn.Parameter, set[nn.Module]],
) -> None:
    """Collect for each parameter the groups that it would be in, one for each of its names."""
    group = module if module in chosen else group
    for parameter in module._parameters.values():
        if parameter is not None:
            groups[parameter].add(group)
    for child in module._modules.values():
        if child is not None:
            _note_groups(child, group, chosen, groups)


# Dtypes -------------------------------------------------------------------------------------------


def _leaving(model: nn.Module, group: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Return the fewest modules that must leave a group so that the rest has one dtype."""
    parameters = list(_parameters_of(group, chosen))
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    if len(dtypes) < 2:
        return []
    found = [_others(group, dtype, chosen) for dtype in dtypes]
    possible = [modules for modules in found if modules is not None]
    if possible:
        return min(possible, key=len)
    if any(parameter.requires_grad for parameter in parameters):
        path = next(path for path, module in model.named_modules() if module is group)
        raise ArgumentError(
            f"{path or type(model).__name__} has parameters of {listed(sorted(map(str, dtypes)))}, "
            "which FSDP2 cannot train in one group; load it with one dtype, or call "
            "requires_grad_(False) on it"
        )
    return []  # parameters that are not trained may have several dtypes


def _others(
    module: nn.Module, dtype: torch.dtype, chosen: Collection[nn.Module]
) -> list[nn.Module] | None:
    """Return the modules in one that have other dtypes; None if its own parameters have some."""
    if any(parameter.dtype != dtype for parameter in module.parameters(recurse=False)):
        return None
    leaving = []
    for child in module.children():
        if child in chosen:
            continue
        dtypes = {parameter.dtype for parameter in _parameters_of(child, chosen)}
        if dtypes <= {dtype}:
            continue
        # Parameters are gathered when a module is called; containers are never called.
        is_called = type(child).forward is not nn.Module.forward
        inner = None if is_called and dtype not in dtypes else _others(child, dtype, chosen)
        if inner is not None:
            leaving += inner
        elif is_called:
            leaving.append(child)
        else:
            return None
    return leaving


def _parameters_of(module: nn.Module, chosen: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, without those of other groups in it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in chosen:
            yield from _parameters_of(child, chosen)
