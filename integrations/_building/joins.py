"""Spares copies of tensors that are joined with nothing.

diffusers' converters split a tensor and pass each part to `torch.cat([part])`. That copies it, and
every process would then have its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class JoinsOfOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `torch.cat` of one contiguous tensor gives that tensor's own memory.

    It sees the calling thread's operations only.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.cat.default and not kwargs:
            tensors = args[0]
            if len(tensors) == 1 and tensors[0].is_contiguous():
                return torch.ops.aten.alias.default(tensors[0])
        return func(*args, **(kwargs or {}))
