"""Builds a pipeline or a model while its weights are still being decoded.

The libraries' own `from_pretrained` builds it from a view. Two checks follow: the kernel's page
tables show that nothing has read a byte before it was decoded, and the built models show that the
rules chose the right dtypes. If the first fails, it is built again once all bytes are there.

A pipeline is built from a view, but it and its errors speak of the source: the path of the view is
kept out of them.
"""

import os
import types
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shmload._building.homes import Homes, watch
from shmload._building.maker import Maker
from shmload._building.mapped import hold_leases, is_unread_in, plain_tensors
from shmload._building.options import QUANTISING_KEYWORDS
from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.library import inside, making
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.rule import Rule, forget_rule
from shmload._checkpoints.source import Source, weight_files
from shmload._host.changes import forks_wait
from shmload._host.limits import repair_errors
from shmload._host.memory import is_modified
from shmload._host.procfs import mappings_of
from shmload._loading.load import Load
from shmload._segments.view import View
from shmload._wording import format_nbytes, logger_of
from shmload.errors import LibraryError

logger = logger_of(__name__)

# Less is not worth a line: models compute small buffers.
_LEAST_NBYTES = 1 << 20


class Build:
    """Builds one pipeline, or one model, from a load.

    Args:
        source: as the maker takes it.
        maker: calls `from_pretrained`.
        rules: the rules that its shards are decoded by, by component.
        load: the load of its shards; stays the caller's.
        torch_dtype: for `from_pretrained`.
        kwargs: the other arguments of `from_pretrained`.
    """

    def __init__(
        self,
        source: Source,
        maker: Maker,
        rules: Mapping[str, Rule],
        load: Load,
        torch_dtype: object,
        kwargs: Mapping[str, Any],
    ) -> None:
        self._source = source
        self._maker = maker
        self._rules = rules
        self._load = load
        self._torch_dtype = torch_dtype
        self._kwargs = kwargs
        self._is_local = os.path.exists(source.given)
        # A model of the hub names its folder in the cache, as the library's own does.
        is_named = self._is_local or is_url(source.given)
        self._root = os.fspath(source.given) if is_named else str(source.root)

    def run(self) -> Any:
        """Build the pipeline, if possible while its weights are being decoded.

        Raises:
            MemoryLimitExceeded: that is not possible, and the load is bounded by its caller.
            LibraryError: another thread has left its models empty.
        """
        made = self._build_early()
        if made is None:
            self._load.keep_all(f"{self._source.given} reads weights while it is built")
            self._load.wait()
            made = self._from_view()
        # A device map may keep weights from the host on purpose.
        if "device_map" not in self._kwargs and _are_emptied(self._models_of(made).values()):
            raise LibraryError(
                f"{self._source.given}: its models were built without weights, because another "
                "thread of this process is in accelerate's init_empty_weights, as in "
                "load_lora_weights or from_pretrained, or two threads were in it at once, which "
                "leaves torch changed; hold one lock around all loads and load_lora_weights; if "
                "this error stays, restart the process"
            )
        return made

    def _models_of(self, made: Any) -> dict[str, torch.nn.Module]:
        """Return the models whose weights this load decodes."""
        found = {
            checkpoint.component: self._maker.component(made, checkpoint.component)
            for checkpoint in self._source.checkpoints
        }
        return {name: model for name, model in found.items() if isinstance(model, torch.nn.Module)}

    def _build_early(self) -> Any:
        """Build the pipeline before all bytes are decoded; return None if that is not possible."""
        holdings = self._load.holdings
        unfinished = {shard.component for shard, _ in holdings.unfinished()}
        if holdings.awaited() or (unfinished and self._reads_at_once):
            return None
        generator_state = torch.get_rng_state()
        try:
            made = self._from_view()
        except Exception as exc:
            # The cause may be bytes that are not decoded yet, or a worker's failure.
            if not unfinished:
                raise
            logger.info("%s: %s: %s", self._source.given, type(exc).__name__, str(exc))
        else:
            if self._is_wholly_mapped(made, unfinished):
                return made
        logger.info("%s: building read weights that were not decoded yet", self._source.given)
        # The libraries draw missing weights at random: draw the same ones again.
        torch.set_rng_state(generator_state)
        return None

    @property
    def _reads_at_once(self) -> bool:
        """Whether the library reads weights while it builds: it casts, joins or copies them."""
        is_asked = "device_map" in self._kwargs or self._maker.reads_weights
        if not self._maker.keeps_blocks:
            is_asked |= any(map(self._kwargs.get, QUANTISING_KEYWORDS))
        return is_asked or any(shard.leaves_casts for shard in self._load.holdings.shards)

    def _from_view(self) -> Any:
        """Build the pipeline from a view of the segments."""
        given = self._source.given
        # A child that another thread forked meanwhile would keep what the libraries patch.
        with making(), forks_wait():
            if not self._source.checkpoints and self._is_local:
                return self._from_path(given)  # there are no other files to lend
            with View(self._source.root, self._files()) as view:
                repair = PathRepair(view.path, self._root, given)
                try:
                    made = self._from_path(str(view.path))
                except Exception as exc:
                    repair_errors(exc, repair.text)
                    raise
            repair.repair(made)
        return made

    def _files(self) -> dict[Path, Path]:
        """Return the files that a view leads to in place of those in the source."""
        files = self._load.holdings.files()
        if self._kwargs.get("variant") is None:
            return files
        # diffusers looks for files of variants with os.walk, which follows no link to a directory:
        # with a file to link, the view makes the directory itself.
        others = {path: path for path in weight_files(self._source)}
        return others | files

    def _from_path(self, path: str | os.PathLike[str]) -> Any:
        """Let the library build it from a directory."""
        with inside():
            return self._maker.make(path, self._torch_dtype, self._kwargs)

    def _is_wholly_mapped(self, made: Any, components: set[str]) -> bool:
        """Tell whether every stored tensor of some components is mapped, and none was read."""
        if not components:
            return True
        # A page copied on write before decoding finished still has zeros around the write.
        parts = {part.inode for _, part in self._load.holdings.unfinished()}
        if any(map(is_modified, mappings_of(parts))):
            return False
        mappings = mappings_of(self._load.holdings.inodes())
        models = (m for name, m in self._models_of(made).items() if name in components)
        tensors = (tensor for model in models for tensor in model.state_dict().values())
        stored = chain.from_iterable(map(plain_tensors, tensors))
        return all(is_unread_in(mappings, tensor) for tensor in stored)

    def was_cast_wrongly(self, made: Any) -> bool:
        """Tell whether a model has other dtypes than its rule says, and forget such rules.

        A tensor that the rule gave fewer bits than the model wants has lost precision.
        """
        is_wrong = False
        for checkpoint in self._source.checkpoints:
            rule = self._rules[checkpoint.component]
            module = self._maker.component(made, checkpoint.component)
            if rule.target is None or rule.is_widening or module is None:
                continue
            if not _agrees(rule, module):
                logger.warning(
                    "%s has dtypes that shmload did not foresee; loading it without conversion",
                    checkpoint.class_name,
                )
                forget_rule(checkpoint, self._torch_dtype)
                is_wrong = True
        return is_wrong

    def finish(self, made: Any, place: Callable[[Any], object] | None, *, verify: bool) -> None:
        """Wait for the rest of the load, and copy the pipeline to its devices.

        Args:
            made: what `run` has returned.
            place: copies it to its devices while bytes are decoded, and waits for all of them;
                None to leave it on the CPU.
            verify: recompute the digest of every segment.
        """
        holdings = self._load.holdings
        if verify or not place:
            self._load.wait()
            if verify:
                self._load.verify()
        if place:
            place(made)
        segments, components = holdings.segments(), self._maker.components(made)
        mappings = mappings_of(holdings.inodes())
        private = hold_leases(components.values(), segments, mappings)
        if private >= _LEAST_NBYTES:
            size = format_nbytes(private)
            logger.info("%s: %s lie in no segment: private memory", self._source.given, size)
        if homes := Homes(segments, mappings):
            for component in components.values():
                if isinstance(component, torch.nn.Module):
                    watch(component, homes)


def _are_emptied(models: Iterable[torch.nn.Module]) -> bool:
    """Tell whether a model of transformers has a parameter without bytes.

    accelerate's `init_empty_weights`, which `load_lora_weights` and peft enter, replaces a method
    of torch for the whole process. A model that another thread builds meanwhile gets empty
    parameters and keeps them.
    """
    return any(
        parameter.is_meta
        for model in models
        if isinstance(model, PreTrainedModel)
        for parameter in model.parameters()
    )


def _agrees(rule: Rule, module: Any) -> bool:
    target = getattr(torch, TORCH_NAMES[rule.target or "F32"])
    return all(
        tensor.dtype == target
        or not tensor.is_floating_point()
        or (rule.only is not None and name not in rule.only)
        or not set(rule.fp32_parts).isdisjoint(name.split("."))
        for name, tensor in module.state_dict().items()
    )


_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Attributes of every module, which never hold a path and would take most of the time.
_INTERNALS = frozenset(vars(torch.nn.Module())) - {"_modules"}
_VOCABULARY_COUNT = 10_000


class PathRepair:
    """Replaces paths below a view by those of the source.

    Args:
        view: the view's directory.
        root: the path of the source's directory, as the libraries would write it.
        given: the source as the user named it; replaces the view's directory itself.
    """

    def __init__(self, view: Path, root: str, given: str | os.PathLike[str]) -> None:
        self._view = str(view)
        self._root = root
        self._given = given

    def text(self, text: str) -> str:
        """Repair a text that mentions paths."""
        below = text.replace(f"{self._view}/", f"{self._root.rstrip('/')}/")
        return below.replace(self._view, os.fspath(self._given))

    def repair(self, pipe: object) -> None:
        """Repair every string reachable from a pipeline through attributes and containers.

        Args:
            pipe: where to begin; for a tuple, in each of its items.
        """
        seen: set[int] = set()
        waiting = list(pipe) if isinstance(pipe, tuple) else [pipe]
        while waiting:
            container = waiting.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            if isinstance(container, dict):
                self._repair_dict(container, waiting)
            elif isinstance(container, list):
                for place, value in enumerate(container):
                    container[place] = self._repaired(value, waiting)
            attributes = getattr(container, "__dict__", None)
            if isinstance(attributes, dict):
                waiting.append(attributes)

    def _repair_dict(self, container: dict[Any, Any], waiting: list[Any]) -> None:
        is_module = "_parameters" in container and "_modules" in container
        for key, value in list(container.items()):
            if is_module and key in _INTERNALS:
                continue
            repaired = self._repaired(value, waiting)
            if repaired is not value:
                # Not container[key] = ...: diffusers' FrozenDict forbids that.
                dict.__setitem__(container, key, repaired)

    def _repaired(self, value: Any, waiting: list[Any]) -> Any:
        """Return a value with its paths replaced; queue it if others may hang from it."""
        if isinstance(value, str):
            if self._view not in value:
                return value
            return self._given if value == self._view else self.text(value)
        if isinstance(value, Path):
            return Path(self.text(str(value))) if self._view in str(value) else value
        if type(value) is tuple:
            repaired = tuple(self._repaired(item, waiting) for item in value)
            return value if all(a is b for a, b in zip(value, repaired, strict=True)) else repaired
        # Empty dicts of hooks, and vocabularies, would take most of the time.
        is_worth_it = not isinstance(value, (dict, list)) or 0 < len(value) < _VOCABULARY_COUNT
        if is_worth_it and not isinstance(value, (*_LEAVES, *_CODE)):
            waiting.append(value)
        return value
