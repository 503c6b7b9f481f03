"""Builds a pipeline or a model while its weights are still being decoded.

The libraries' own `from_pretrained` builds it from a view. Two checks follow: the kernel's page
tables show that nothing has read a byte before it was decoded, and the built models show that the
rules chose the right dtypes. If a check fails, the pipeline is built again.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shmload._building.homecoming import watch
from shmload._building.homes import Homes
from shmload._building.keywords import QUANTISING_KEYWORDS
from shmload._building.libraries import (
    Said,
    empties,
    inside,
    is_emptied,
    libraries,
    require_undisturbed,
)
from shmload._building.maker import Maker, NotToBeCast
from shmload._building.mapped import Spans, hold_leases, plain_tensors
from shmload._building.paths import PathRepair
from shmload._checkpoints.chosen_rule import forget_rule
from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source, has_none_else, weight_files
from shmload._devices.destination import BytesNeeded
from shmload._host.changes import Change
from shmload._host.pagemap import is_modified
from shmload._host.procfs import mappings
from shmload._loading.load import Load
from shmload._segments.view import View
from shmload._wording import format_nbytes, logger_of
from shmload.errors import LibrariesDisturbed

logger = logger_of(__name__)

# Builds of one pipeline that other threads may disturb before that is an error.
_MOST_BUILDS = 3
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
        place: copies what was built to its devices, after or while the bytes are decoded; None to
            leave it on the CPU.
        said: what the libraries have logged in this call, which is not logged again.
    """

    def __init__(
        self,
        source: Source,
        maker: Maker,
        rules: Mapping[str, Rule],
        load: Load,
        torch_dtype: object,
        kwargs: dict[str, Any],
        place: Callable[[Any], None] | None = None,
        said: Said | None = None,
    ) -> None:
        self._source = source
        self._maker = maker
        self._place = place
        self._rules = rules
        self._load = load
        self._torch_dtype = torch_dtype
        self._kwargs = kwargs
        self._said: Said = set() if said is None else said
        self._is_local = os.path.exists(source.given)
        # A model of the hub names its folder in the cache, as the library's own does.
        is_named = self._is_local or is_url(source.given)
        self._root = os.fspath(source.given) if is_named else str(source.root)

    def run(self, *, verify: bool, may_be_wrong: bool) -> Any:
        """Build the pipeline, if possible while its weights are being decoded.

        Args:
            verify: recompute the digest of every segment.
            may_be_wrong: the rules may have the wrong dtypes. If not, they convert nothing.

        Raises:
            BytesNeeded: that is not possible, and the load has stand-ins, which get no bytes.
            NotToBeCast: the segments have the wrong dtypes.
        """
        state = torch.get_rng_state()
        try:
            return self._run(verify=verify, may_be_wrong=may_be_wrong)
        except (BytesNeeded, NotToBeCast):
            # The libraries draw missing weights at random: the next build draws the same ones.
            torch.set_rng_state(state)
            raise

    def _run(self, *, verify: bool, may_be_wrong: bool) -> Any:
        pipe = self._build_models()
        if may_be_wrong and self._was_cast_wrongly(pipe):
            self._require_no_stand_ins()
            raise NotToBeCast
        self._finish(pipe, verify=verify)
        return pipe

    def models_of(self, pipe: Any) -> dict[str, torch.nn.Module]:
        """Return the models whose weights this load decodes."""
        found = {
            checkpoint.component: self._maker.part(pipe, checkpoint.component)
            for checkpoint in self._source.checkpoints
        }
        return {name: model for name, model in found.items() if isinstance(model, torch.nn.Module)}

    def _build_models(self) -> Any:
        """Let the libraries build it all; again if another thread has left its models empty.

        Raises:
            LibrariesDisturbed: they were empty each time, or torch stays changed.
        """
        generator_state = torch.get_rng_state()
        for _ in range(_MOST_BUILDS):
            try:
                pipe = self._build_early(self._load.holdings.unfinished_components())
                if pipe is None:
                    self._require_no_stand_ins()
                    self._load.wait()
                    pipe = self._from_view()
            except (TypeError, NotImplementedError):  # the library met an empty parameter
                if not empties():
                    raise
            else:
                # A device map may keep weights from the host on purpose.
                if "device_map" in self._kwargs or not is_emptied(self.models_of(pipe).values()):
                    return pipe
                del pipe
            logger.info("%s: another thread emptied its models", self._source.given)
            require_undisturbed(self._source.given)
            torch.set_rng_state(generator_state)
        raise LibrariesDisturbed(str(self._source.given))

    def _require_no_stand_ins(self) -> None:
        if self._load.holdings.hollow:  # they get no bytes
            raise BytesNeeded

    def _build_early(self, unfinished: set[str]) -> Any:
        """Build the pipeline before all bytes are decoded; return None if that failed."""
        holdings = self._load.holdings
        if not holdings.has_every_file or (unfinished and self._reads_at_once):
            return None
        generator_state = torch.get_rng_state()
        try:
            pipe = self._from_view()
        except Exception as exc:
            if not unfinished or (holdings.hollow and not holdings.was_read_early):
                raise
            # The cause may be bytes that are not decoded yet, or a worker's failure.
            if holdings.hollow:
                # Not this error itself: its traceback keeps the half-built models alive.
                raise BytesNeeded(f"{type(exc).__name__}: {exc}") from None
        else:
            if self._is_wholly_mapped(pipe, unfinished):
                return pipe
        logger.info("%s: building read weights that were not decoded yet", self._source.given)
        # The libraries draw missing weights at random: draw the same ones again.
        torch.set_rng_state(generator_state)
        return None

    def _finish(self, pipe: Any, *, verify: bool) -> None:
        """Wait for the rest of the load, and copy the pipeline to its devices."""
        if not self._load.holdings.hollow and (verify or not self._place):
            self._load.wait()
            if verify:
                self._load.verify()
        if self._place:
            self._place(pipe)  # this copies bytes while others are decoded, and waits for all
        holdings, parts = self._load.holdings, self._maker.parts(pipe)
        segments, inodes = holdings.segments(), holdings.inodes()
        private = hold_leases(parts.values(), segments, Spans(inodes))
        if private >= _LEAST_NBYTES:
            size = format_nbytes(private)
            logger.info("%s: %s lie in no segment: private memory", self._source.given, size)
        if homes := Homes(segments, Spans(inodes)):
            for part in parts.values():
                if isinstance(part, torch.nn.Module):
                    watch(part, homes)

    @property
    def _reads_at_once(self) -> bool:
        """Whether the library reads weights while it builds: it casts, joins or copies them."""
        is_asked = "device_map" in self._kwargs or self._maker.reads_weights
        if not self._maker.keeps_blocks:
            is_asked |= any(map(self._kwargs.get, QUANTISING_KEYWORDS))
        return is_asked or self._load.holdings.leaves_casts

    def _from_view(self) -> Any:
        """Build the pipeline from a view of the segments."""
        given = self._source.given
        # The libraries' loading is not thread-safe, nor is the repair of messages.
        with libraries(), contextlib.ExitStack() as lending:
            if not self._source.checkpoints and self._is_local:
                return self._from_path(given)  # there are no other files to lend
            view = lending.enter_context(View(self._source.root, self._files()))
            unsaid = self._maker.unsaid(self._kwargs)
            repair = PathRepair(view.path, self._root, given, self._said, unsaid)
            with repair.in_messages():
                made = self._from_path(str(view.path))
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
        kwargs = self._kwargs
        if kwargs.get("use_safetensors") is False and has_none_else(self._source):
            kwargs = {**kwargs, "use_safetensors": None}  # the segments of these are safetensors
        # Mapped weights need no threads to fetch them: without threads a build takes a sixth less
        # time. In inference mode they stay: they run outside of it, and make other tensors than
        # this thread would.
        is_theirs = self._reads_at_once or torch.is_inference_mode_enabled()
        threads = contextlib.nullcontext() if is_theirs else _no_loading_threads.made()
        with inside(), threads:
            return self._maker.make(path, self._torch_dtype, dict(kwargs))

    def _is_wholly_mapped(self, pipe: Any, components: set[str]) -> bool:
        """Tell whether every stored tensor of some components is mapped, and none was read."""
        if not components:
            return True
        # A page copied on write before decoding finished still has zeros around the write.
        if any(map(is_modified, mappings(self._load.holdings.unfinished_inodes()))):
            return False
        spans = Spans(self._load.holdings.inodes())
        models = (m for name, m in self.models_of(pipe).items() if name in components)
        tensors = (tensor for model in models for tensor in model.state_dict().values())
        return all(map(spans.holds_unread, chain.from_iterable(map(plain_tensors, tensors))))

    def _was_cast_wrongly(self, pipe: Any) -> bool:
        """Tell whether a model has other dtypes than its rule says, and forget such rules.

        A tensor that the rule gave fewer bits than the model wants has lost precision.
        """
        is_wrong = False
        for checkpoint in self._source.checkpoints:
            rule = self._rules[checkpoint.component]
            module = self._maker.part(pipe, checkpoint.component)
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


def _set_variable() -> None:
    os.environ.setdefault(_VARIABLE, "1")


def _reset_variable(before: str | None) -> None:
    if before is None:
        os.environ.pop(_VARIABLE, None)


# transformers 5 fetches tensors in the calling thread then.
_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
_no_loading_threads = Change(
    "the variable of loading threads",
    lambda: os.environ.get(_VARIABLE),
    _set_variable,
    _reset_variable,
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
