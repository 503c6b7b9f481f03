"""`load_pipeline`: a diffusion pipeline whose weights lie in shared memory.

Guarantee: what it returns equals what `from_pretrained` gives with the same arguments, or it
raises. The pipeline is built while workers still decode, by the library's own `from_pretrained`
from a view. That nothing has looked at a byte too early is not hoped for but read off the kernel's
page tables, and that the dtypes were guessed right is checked on the built models; otherwise it is
built again.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmload._collector import freeze_imports, paused_gc
from shmload._dtypes import TORCH_NAMES, parse_dtype
from shmload._errors import SourceNotFound
from shmload._hub import find_source
from shmload._load import Load
from shmload._progress import Callback, Progress
from shmload._resolve import Checkpoint, Source
from shmload._rules import RAW, Rule, forget_rule, likely_rule, rule_for
from shmload._view import View
from shmload.integrations.mapped import Spans, hold_leases
from shmload.integrations.paths import PathRepair

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)

_HUB_KWARGS = ("revision", "cache_dir", "token", "local_files_only", "force_download")
# With these the library reads other files, or makes new tensors of what it reads.
_BYPASSING_KWARGS = ("use_flashpack", "use_onnx", "quantization_config")


def load_pipeline(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    device_map: str | None = None,
    keep: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **from_pretrained_kwargs: Any,
) -> "DiffusionPipeline":
    """Load a diffusion pipeline through shared memory.

    Args:
        source: what `DiffusionPipeline.from_pretrained` takes: a directory, or a hub id.
        torch_dtype: a `torch.dtype`, its name, a dict of these by component (with a `default`), or
            None, which means what it means there: float32 for diffusers' models, the checkpoint's
            own dtype for those of transformers.
        device_map: as there.
        keep: leave the segments resident for the next process. Else they belong to this pipeline
            alone and go with its last tensor; segments that are resident already stay.
        workers: worker processes; None for as many as there are cores to spare.
        verify: recompute the segments' digests, resident ones too.
        progress: a callback of bytes done and bytes in all, True or False for a bar, None for a bar
            on a terminal.
        from_pretrained_kwargs: everything else that `from_pretrained` takes, components included;
            the weights of components passed in are not decoded.

    Returns:
        The pipeline, of its own class, on the CPU unless `device_map` says otherwise. Its
        parameters are mapped from the segments copy-on-write: writing to one is private to this
        process.

    Raises:
        ShmloadError: the source, its files, the room for it, or a worker is at fault.
        Exception: whatever `from_pretrained` raises, with the source's own paths in it.
    """
    kwargs = from_pretrained_kwargs
    if torch_dtype is None:
        torch_dtype = kwargs.pop("dtype", None)  # the newer name in diffusers
    # What this asks for, large reads instead of page faults, is what the workers do.
    kwargs.pop("disable_mmap", None)
    hub_kwargs = {name: kwargs[name] for name in _HUB_KWARGS if kwargs.get(name) is not None}
    found = find_source(source, variant=kwargs.get("variant"), passed=kwargs, **hub_kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            source, "not a pipeline (no model_index.json); use load_state_dict or view for it"
        )
    is_bypassed = kwargs.get("use_safetensors") is False or any(map(kwargs.get, _BYPASSING_KWARGS))

    def choose_rules(choose: Callable[[Checkpoint, object], Rule]) -> dict[str, Rule]:
        return {
            checkpoint.component: RAW if is_bypassed else choose(checkpoint, torch_dtype)
            for checkpoint in found.checkpoints
        }

    rules = choose_rules(likely_rule)
    with (
        paused_gc(),
        Progress(progress, found.root.name) as counter,
        contextlib.ExitStack() as loads,
    ):

        def begin() -> Load:
            is_busy = "diffusers" not in sys.modules
            load = Load(
                found, rules, keep=keep, progress=counter, parent_is_busy=is_busy, workers=workers
            )
            return loads.enter_context(load)

        load = begin()
        is_cold = "diffusers" not in sys.modules
        _import_classes(found)  # most of a cold process's time; workers decode meanwhile
        if is_cold:
            freeze_imports()
        certain = choose_rules(rule_for)
        if certain != rules:
            load.discard()
            rules = certain
            load = begin()
        return _Build(found, rules, load, torch_dtype, device_map, kwargs).run(verify=verify)


def download(repo_id: str, **kwargs: Any) -> str:
    """Bring a pipeline's or component's files into the hub cache and return their directory.

    Args:
        repo_id: its id.
        kwargs: as for `DiffusionPipeline.download`.
    """
    from diffusers import DiffusionPipeline
    from huggingface_hub import file_exists, snapshot_download

    hub = {name: kwargs[name] for name in ("revision", "token") if kwargs.get(name)}
    if not file_exists(repo_id, "model_index.json", **hub):
        kwargs.pop("variant", None)  # one component: all of its files
        return str(snapshot_download(repo_id, **kwargs))
    return str(DiffusionPipeline.download(repo_id, **kwargs))


class _Build:
    """Builds one pipeline from a view of a load."""

    def __init__(
        self,
        source: Source,
        rules: Mapping[str, Rule],
        load: Load,
        torch_dtype: object,
        device_map: str | None,
        kwargs: dict[str, Any],
    ) -> None:
        self._source = source
        self._rules = rules
        self._load = load
        self._torch_dtype = torch_dtype
        self._said: set[tuple[str, int, str]] = set()
        self._kwargs = kwargs | ({} if device_map is None else {"device_map": device_map})

    def run(self, *, verify: bool) -> "DiffusionPipeline":
        """Build it, while the load goes on where that is possible."""
        import torch

        unfinished = self._load.unfinished_components()
        pipe = None
        if self._can_build_early(unfinished):
            generator_state = torch.get_rng_state()
            try:
                pipe = self._from_view()
            except Exception:
                if not unfinished:
                    raise
                # What it stumbled over may be bytes that are not there yet, or a worker's failure.
            if pipe is None or not self._is_wholly_mapped(pipe, unfinished):
                logger.info("%s: weights were wanted before they were there", self._source.given)
                pipe = None
                # Missing weights are drawn at random: the same again.
                torch.set_rng_state(generator_state)
        self._load.wait()
        if verify:
            self._load.verify()
        if pipe is None:
            pipe = self._from_view()
        if self._has_other_dtypes(pipe):
            pipe = self._from_view(decoded=False)
            self._load.discard()
        hold_leases(pipe.components.values(), self._load.segments())
        return pipe

    def _can_build_early(self, unfinished: set[str]) -> bool:
        """Tell whether building is worth while before all bytes are there."""
        if not unfinished:
            return self._load.has_every_file
        # Weights that the library casts, or copies to a device, are read at once.
        reads_at_once = self._load.leaves_casts or "device_map" in self._kwargs
        return self._load.has_every_file and not reads_at_once

    def _from_view(self, *, decoded: bool = True) -> "DiffusionPipeline":
        """Build it from a view, of the segments or else of the shards as they are."""
        given = self._source.given
        root = os.fspath(given) if os.path.exists(given) else str(self._source.root)
        with View(self._source.root, self._load.files() if decoded else {}) as view:
            repair = PathRepair(view.path, root, given, self._said)
            with repair.in_messages():
                pipe = self._from_path(view.path)
            repair.repair(pipe)
        return pipe

    def _from_path(self, root: Path) -> "DiffusionPipeline":
        """Let the library build the pipeline, as the class that the source names.

        The base class would decide by its own list of optional components which of those passed in
        are honoured; that of the concrete class is the right one.
        """
        import diffusers
        from diffusers.pipelines import pipeline_utils

        pipeline_class = diffusers.DiffusionPipeline
        if "custom_pipeline" not in self._kwargs:
            pipeline_class = getattr(diffusers, self._source.class_name, pipeline_class)
        # The older name still works but warns.
        keyword = "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"
        dtype = {} if self._torch_dtype is None else {keyword: _as_torch(self._torch_dtype)}
        pipe: DiffusionPipeline = pipeline_class.from_pretrained(str(root), **dtype, **self._kwargs)
        return pipe

    def _is_wholly_mapped(self, pipe: "DiffusionPipeline", components: set[str]) -> bool:
        """Tell whether every stored tensor of some models is mapped, and none was read."""
        if not components:
            return True
        spans = Spans(self._load.inodes())
        modules = (getattr(pipe, component, None) for component in components)
        tensors = (t for module in modules if module for t in module.state_dict().values())
        return all(map(spans.holds_unread, tensors))

    def _has_other_dtypes(self, pipe: "DiffusionPipeline") -> bool:
        """Tell whether some model has a dtype that its rule did not foresee, and forget such rules.

        A tensor that was stored in fewer bits than the model has in the end has lost some of them.
        """
        is_wrong = False
        for checkpoint in self._source.checkpoints:
            rule = self._rules[checkpoint.component]
            module = getattr(pipe, checkpoint.component, None)
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


def _import_classes(source: Source) -> None:
    """Import what the pipeline is made of."""
    import diffusers
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    for checkpoint in source.checkpoints:
        if checkpoint.library in libraries:
            getattr(libraries[checkpoint.library], checkpoint.class_name, None)


def _as_torch(dtype: object) -> object:
    """Turn names of dtypes, alone or in a dict by component, into torch's objects."""
    import torch

    if isinstance(dtype, Mapping):
        return {name: _as_torch(value) for name, value in dtype.items()}
    return None if dtype is None else getattr(torch, TORCH_NAMES[parse_dtype(dtype)])


def _agrees(rule: Rule, module: Any) -> bool:
    import torch

    target = getattr(torch, TORCH_NAMES[rule.target or "F32"])
    return all(
        tensor.dtype == target
        or not tensor.is_floating_point()
        or (rule.only is not None and name not in rule.only)
        or not set(rule.fp32_parts).isdisjoint(name.split("."))
        for name, tensor in module.state_dict().items()
    )
