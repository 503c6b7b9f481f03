"""Numbers of hooks, as torch counts them.

torch keeps a module's hooks in tables, and numbers the hooks of all modules in the order in which
they are registered (`torch.utils.hooks.RemovableHandle.next_id`). So each build takes the next
numbers. In a skeleton the numbers begin at 0; a load gives its models those that a build would have
taken. With older numbers, a hook that a program registers could replace one of the library's.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def next_number() -> int:
    """Return the number that the next hook of this process gets."""
    return RemovableHandle.next_id


def renumber(models: Iterable[torch.nn.Module], by: int) -> None:
    """Add to the numbers of all hooks of some models; their order stays."""
    for table in _tables(models):
        moved = [(number + by, hook) for number, hook in table.items()]
        table.clear()
        table.update(moved)


def take_numbers(models: Iterable[torch.nn.Module], count: int) -> None:
    """Give models whose hooks are numbered from 0 the next numbers of this process.

    Args:
        models: from a skeleton.
        count: how many numbers their build takes, also for hooks that it removes.
    """
    if count:
        renumber(models, next_number())
        RemovableHandle.next_id += count


def _tables(models: Iterable[torch.nn.Module]) -> Iterator[dict[int, Any]]:
    """Yield the tables of hooks that are not empty, each once."""
    seen = set()
    for model in models:
        for module in model.modules():
            for name, held in vars(module).items():
                if "_hooks" in name and isinstance(held, dict) and held and id(held) not in seen:
                    seen.add(id(held))
                    yield held
