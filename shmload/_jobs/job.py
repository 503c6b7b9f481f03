"""A job: processes that have a pipeline, and functions mapped over items in them."""

import contextlib
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, get_args

from shmload._checkpoints.dtypes import TORCH_NAMES, parse_dtype
from shmload._checkpoints.wanted import PIPELINE_ARGUMENTS, require_known
from shmload._jobs.arguments import (
    check_items,
    check_numbers,
    devices_of,
    handle_of,
)
from shmload._jobs.crew import Crew
from shmload._jobs.dispatch import Item
from shmload._jobs.item_bar import ItemBar
from shmload._jobs.maps import Function, map_here, map_in_crew
from shmload._jobs.storing import Storing, Undone, end_if_all_fail
from shmload._placement.inventory import CPU
from shmload._runtimes.kinds import likely_kind
from shmload._wording import logger_of
from shmload.errors import ArgumentError, ItemError, ItemFailed
from shmload.integrations.handles import Handle
from shmload.integrations.results import ResultFolder, ResultsReport

logger = logger_of(__name__)

Errors = Literal["raise", "pass"]
"""What an item's error does: end the map, or stand in the result's place."""


class Job:
    """Processes that have a pipeline, for any number of maps; a context that ends them.

    The weights are decoded once; that begins when the job is made. One process imports the
    libraries and builds the pipeline, and the others are forked from it, so each starts in a
    moment. No `if __name__ == "__main__"` is needed. What the function needs may be defined
    anywhere: it goes by value where it cannot be imported.

    Args:
        source: a pipeline's directory, a hub id, or a `Handle`. With a handle give none of
            `components`, `dtype`, `variant` and `hub_kwargs`: it knows them.
        components: decode only these of the components with weights, the others are None; None for
            all.
        dtype: as for `load_pipeline`.
        variant: as for `from_pretrained`.
        procs: how many processes; 0 to call the function in this process, for debugging.
        devices: where the models go: `cpu`; one device for all; a list, whose entries the processes
            get in turn; `round-robin` for all GPUs in turn.
        threads: of each process, for torch. The last bit of some results depends on their number.
        preload: modules that the function needs, imported once for all processes; torch, diffusers
            and transformers always are.
        seed: of random numbers, together with an item's place; an integer of less than 64 bits.
        item_timeout_s: a process without a result for so many seconds counts as hung: it is
            killed, and its item done again. None for never.
        start: start the processes now; False: when an item first needs them.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`.

    Raises:
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError, ArgumentError.
        JobFailed: the processes cannot be started.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Handle,
        *,
        components: Collection[str] | None = None,
        dtype: object = None,
        variant: str | None = None,
        procs: int = 4,
        devices: str | Sequence[Any] = CPU,
        threads: int = 1,
        preload: Sequence[str] = (),
        seed: int = 0,
        item_timeout_s: float | None = 3600.0,
        start: bool = True,
        **hub_kwargs: Any,
    ) -> None:
        require_known(hub_kwargs, Job, PIPELINE_ARGUMENTS | {"torch_dtype"})
        check_numbers(procs, threads, item_timeout_s)
        self.handle = handle_of(source, components, dtype, variant, hub_kwargs)
        self._seed = operator.index(seed)
        self._procs = procs
        self._threads = threads
        self._item_timeout_s = item_timeout_s
        self._is_mapping = False
        chosen = devices_of(devices, procs)
        kinds = {
            likely_kind() if name == "round-robin" else name.partition(":")[0] for name in chosen
        }
        self._kinds = ",".join(sorted(kinds))
        self._crew = None
        if procs:
            self._crew = Crew(self.handle, chosen, threads, preload, start=start)
            self._closing = weakref.finalize(self, self._crew.close)
        elif set(chosen) != {CPU}:
            raise ArgumentError("procs is 0: the models of this process stay on the CPU")
        else:
            mine = contextlib.ExitStack()
            if self.handle is not source:
                mine.callback(self.handle.close)
            self._closing = weakref.finalize(self, mine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"{self._procs} processes" if self._procs else "this process"
        state = "" if self._closing.alive else ", closed"
        return f"Job({self.handle!r}): {where} on {self._kinds}{state}"

    def close(self) -> None:
        """End the processes, whatever they are doing, and wait until they have ended.

        A second call does nothing. Another thread may call it while a map runs: the map ends with
        an `ArgumentError`.
        """
        self._closing()

    def map(
        self,
        function: Function,
        items: Iterable[Any],
        *,
        as_completed: bool = False,
        errors: Errors = "raise",
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """Call a function on every item, and yield what it returns.

        Items are taken as they are needed, and results wait until they are fetched. At most 16
        items for each process are held at a time, results included.

        Args:
            function: is called with the pipeline and an item. Gradients are off, and the global
                random generators of torch, numpy and Python are seeded for each item.
            items: must be picklable.
            as_completed: yield results as they come, instead of in the order of the items.
            errors: what an error of the function does: `raise` ends the map with an `ItemFailed`;
                `pass` yields the `ItemFailed` in the result's place.
            progress: True for a bar of items, False for nothing. None for a bar on a terminal, and
                elsewhere for a line now and then on stderr.

        Yields:
            Results; their tensors are on the CPU and without gradients. An item at which three
            processes have ended gives an `ItemKilled` in the result's place, which is logged too.

        Raises:
            ItemFailed: the function raised an error, which is its `__cause__`; it names the item.
            JobFailed: the processes keep ending before they have worked.
            ShmloadError: the pipeline cannot be loaded.
        """
        check_items(items)
        numbered = map(Item, itertools.count(), items)
        with (
            ItemBar(items, progress) as bar,
            self._mapping(function, numbered, bar, errors, is_ordered=not as_completed) as found,
        ):
            for _, value in found:
                _raise_or_log(value, errors)
                bar.update()
                yield value

    def write(
        self,
        function: Function,
        items: Iterable[Any],
        folder: str | os.PathLike[str],
        *,
        key: Callable[[Any], str] | None = None,
        shard_items: int = 1000,
        errors: Errors = "raise",
        retry_failed: bool = False,
        save_dtype: object = None,
        format: str = "safetensors",
        facts: Mapping[str, str] | None = None,
        progress: bool | None = None,
    ) -> ResultsReport:
        """Call a function on every item and store what it returns; blocks until all is done.

        After a kill or an error, call this again with the same items: it goes on where it was, and
        does no stored item again. The files are then those of an uninterrupted run, byte for byte.
        `docs/dataprep.md` says what is in them.

        Args:
            function: as for `map`; returns tensors or numpy arrays by name.
            items: as for `map`, in the same order each time.
            folder: made if it does not exist.
            key: returns an item's key, by which its result is found; None for its number as text of
                eight digits: `00000007`.
            shard_items: how many items each results file (shard) holds.
            errors: what an error of the function does: `raise` ends the run with an `ItemFailed`;
                `pass` goes on without the item, as without an item at which three processes have
                ended. The index lists such items with their errors.
            retry_failed: try items again that failed in an earlier call; otherwise they stay
                failed, and cost nothing.
            save_dtype: floating results are cast to it, a dtype of torch or its name; None stores
                each as it is.
            format: of the results files: `safetensors`; `parquet`, which needs the extra
                `shmload[parquet]`; `webdataset`, which needs `shmload[webdataset]`.
            facts: what else the results depend on, such as a size; the next call must give the
                same.
            progress: as for `map`.

        Raises:
            ItemFailed, JobFailed, ShmloadError: as `map`; stored results stay.
            JobFailed: also with `errors="pass"`, if no item of the folder has a result and eight
                have failed with the same error; of fewer items, if most have.
            UnknownDtype: `save_dtype` is not a floating dtype.
            ResultsError: the folder cannot be written to, or holds something else.
        """
        check_items(items)
        known = self.handle.facts | {
            "seed": str(self._seed),
            "threads": str(self._threads),
            "devices": self._kinds,
        }
        saved_as = None
        if save_dtype is not None:
            saved_as = known["save_dtype"] = TORCH_NAMES[parse_dtype(save_dtype)]
        if taken := known.keys() & dict(facts or {}):
            raise ArgumentError(f"facts has {min(taken)!r}, which says something else already")
        known |= dict(facts or {})
        with (
            ResultFolder(
                folder,
                shard_items=shard_items,
                facts=known,
                retry_failed=retry_failed,
                format=format,
            ) as results,
            ItemBar(items, progress) as bar,
        ):
            undone = Undone(items, key, results, bar.skip)
            storing = Storing(function, saved_as)
            with self._mapping(storing, iter(undone), bar, errors, is_ordered=False) as found:
                if errors == "pass":
                    found = end_if_all_fail(found, lambda: undone.has_results)
                for index, value in found:
                    _raise_or_log(value, errors)
                    name = undone.keys.pop(index)
                    if isinstance(value, ItemError):
                        results.fail(index, name, value.reason)
                    else:
                        results.add(index, name, value)
                    bar.update()
            return results.finish(undone.count)

    @contextlib.contextmanager
    def _mapping(
        self,
        function: Function,
        items: Iterator[Item],
        bar: ItemBar,
        errors: Errors,
        *,
        is_ordered: bool,
    ) -> Iterator[Iterator[Item]]:
        """Provide what becomes of each item, for one map at a time; ends the map with the block."""
        if errors not in get_args(Errors):
            raise ArgumentError(f"errors is {errors!r}; it must be 'raise' or 'pass'")
        if self._is_mapping:
            raise ArgumentError("this job is at another map; end that first, or make another job")
        crew = self._crew
        if crew:
            found = map_in_crew(
                crew,
                function,
                items,
                is_ordered=is_ordered,
                seed=self._seed,
                item_timeout_s=self._item_timeout_s,
                on_wait=lambda: bar.wait(
                    is_started=any(each.is_started for each in crew.runners.values())
                ),
            )
        elif self._closing.alive:
            found = map_here(self.handle, function, items, seed=self._seed, threads=self._threads)
        else:
            raise ArgumentError("this job is closed; make another one")
        self._is_mapping = True
        try:
            # Closed here, not by the garbage collector: an error that is kept keeps its frame.
            with contextlib.closing(found):
                yield found
        finally:
            self._is_mapping = False


def _raise_or_log(value: object, errors: Errors) -> None:
    """Raise or log what became of an item, if that is an error."""
    if isinstance(value, ItemFailed) and errors == "raise":
        raise value
    if isinstance(value, ItemError):
        logger.warning("%s", value)
