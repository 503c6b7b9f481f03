"""A job: processes that have a pipeline, and functions mapped over items in them."""

import contextlib
import itertools
import operator
import os
import reprlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

from tqdm import tqdm

from shmload._wording import logger_of
from shmload.errors import ArgumentError, ItemFailed
from shmload.integrations.dataprep.crossing import describe_error, dump_whole
from shmload.integrations.dataprep.folder import Folder, Report
from shmload.integrations.dataprep.pool import Outcome, Pool
from shmload.integrations.dataprep.processes import Setup
from shmload.integrations.dataprep.runner import Function
from shmload.integrations.dataprep.shards import Row, Task
from shmload.integrations.handles import Handle

logger = logger_of(__name__)

_HELD = 16
"""So many results of each process wait for an earlier one."""

# Enough of an item to recognize it, such as a path.
_ITEM = reprlib.Repr()
_ITEM.maxstring = _ITEM.maxother = 200


class Job(contextlib.AbstractContextManager["Job"]):
    """Processes that share a pipeline's weights, for any number of maps; a context that ends them.

    The processes start with the first item. One imports the libraries and loads the pipeline; the
    others are forked from it, so each is there in a moment. No `if __name__ == "__main__"` is
    needed: what the function needs goes by value where it cannot be imported.

    Args:
        source: a pipeline's directory, a hub id, or a `Handle`; None for a job without a pipeline.
            A handle knows the components and the dtype: give neither with it.
        components: load only these of the components with weights, the others are None; None for
            all.
        dtype: as for `load_pipeline`.
        procs: how many processes.
        device: where the models go: `cpu`; `cuda`, of which each process gets the next; `cuda:1`.
        threads: of each process, for torch. The last bit of some results depends on their number.
        preload: modules that the function needs, imported once for all processes; with a source,
            torch, diffusers and transformers always are.
        seed: of random numbers, together with an item's number; an integer.
        timeout_s: a process that needs longer for an item counts as hung, and is killed; None for
            never.
        source_kwargs: as for `Handle.of`: `variant`, `revision`, `cache_dir`, ...

    Raises:
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError: as `Handle.of`.
        ArgumentError: an argument cannot work.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Handle | None,
        *,
        components: Collection[str] | None = None,
        dtype: object = None,
        procs: int = 4,
        device: str = "cpu",
        threads: int = 1,
        preload: Sequence[str] = (),
        seed: int = 0,
        timeout_s: float | None = 3600.0,
        **source_kwargs: Any,
    ) -> None:
        if procs < 1 or threads < 1:
            raise ArgumentError(f"procs is {procs}, threads is {threads}; give 1 or more")
        given = source_kwargs | {"components": components, "dtype": dtype}
        if source is not None and not isinstance(source, Handle):
            source = Handle.of(source, **given)
        elif extra := [name for name, value in given.items() if value is not None]:
            raise ArgumentError(f"the source is no path or hub id: do not give {', '.join(extra)}")
        self.handle = source
        self._setup = Setup(
            handle=self.handle.text if self.handle else None,
            preload=tuple(preload),
            path=tuple(os.path.abspath(folder) for folder in sys.path),
            owner=os.getpid(),
            device=device,
            threads=threads,
            seed=operator.index(seed),
        )
        self._procs = procs
        self._pool = Pool(self._setup, procs, timeout_s)
        self._closing = weakref.finalize(self, self._pool.close)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing, and wait for it; again it does nothing."""
        self._closing()

    def map(
        self,
        function: Function,
        items: Iterable[Any],
        *,
        ordered: bool = True,
        errors: Literal["raise", "pass"] = "raise",
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """Call a function on every item, and yield what it returns.

        Items are taken as they are needed, so they may be endless. At most 32 results of each
        process wait for an earlier one. Closing the iterator ends the work on the items.

        Args:
            function: is called with the pipeline and an item, without gradients. The random
                generators of torch, numpy and Python are seeded for each item.
            items: whatever can be pickled.
            ordered: yield results in the order of the items, or else as they come.
            errors: `raise` ends the map with the `ItemFailed` of an item; `pass` yields it in the
                result's place.
            progress: True for a bar of items, False for nothing; None for a bar on a terminal.

        Yields:
            Results; their tensors are on the CPU.

        Raises:
            ItemFailed: the function raised an error, which is its `__cause__`; or three processes
                have ended at the item.
            JobError: a process has ended before it could work.
            CapacityError: a limit, such as `ulimit -v`, forbids a process.
            ShmloadError: the pipeline cannot be loaded.
        """
        numbered = enumerate(items)
        taken: dict[int, Any] = {}
        """Items that have no outcome yet, by number."""
        held: dict[int, Outcome] = {}
        given = 0

        def take(count: int) -> Task | None:
            if len(held) >= _HELD * self._procs:
                return None
            rows = []
            for number, item in itertools.islice(numbered, count):
                taken[number] = item
                rows.append(Row.of(number, item))
            return Task(rows) if rows else None

        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(_Bar(items, progress))
            run = self._pool.run(dump_whole(function), take, bar.show)
            for outcome in stack.enter_context(contextlib.closing(run)):
                held[outcome.row.number if ordered else given] = outcome
                while given in held:
                    row, value, error = held.pop(given)
                    given += 1
                    item = taken.pop(row.number)
                    if error is not None:
                        value = _failed(row, item, error)
                        if errors != "pass":
                            raise value
                    yield value

    def write(
        self,
        function: Function,
        items: Iterable[Any],
        folder: str | os.PathLike[str],
        *,
        key: Callable[[Any], str] | None = None,
        format: str = "safetensors",
        shard_items: int = 256,
        retry: bool = False,
        facts: Mapping[str, str] | None = None,
        progress: bool | None = None,
    ) -> Report:
        """Call a function on every item and store what it returns; blocks until all is done.

        After a kill or an error, call this again with the same items. It does the shards that are
        not done; the files are then those of an undisturbed run, byte for byte. If all is done, no
        process starts.

        Args:
            function: as for `map`; returns tensors or numpy arrays by name.
            items: as for `map`, in the same order each time; more may follow in a later call.
            folder: made if it does not exist.
            key: returns an item's key, by which its result is found; None for its number as text of
                eight digits, `00000007`.
            format: of the shards: `safetensors`; `parquet`, which needs `shmload[parquet]`; or
                `webdataset`, which needs `shmload[webdataset]`.
            shard_items: how many items a shard has. A process holds the results of one in memory;
                a kill loses the shards under way.
            retry: do shards again in which items have failed; else they stay failed.
            facts: what else the results depend on, as text by name; the next call must give the
                same.
            progress: as for `map`.

        Raises:
            JobError, ShmloadError: as `map`; shards that are done stay.
            ArgumentError: two items have the same key, or a fact is no text.
            ResultsError: the folder is another job's, or has other results, or cannot be written.
        """
        known = self._facts(facts or {})
        with contextlib.ExitStack() as stack:
            there = stack.enter_context(Folder(folder, known, format, shard_items))
            bar = stack.enter_context(_Bar(items, progress))
            report = there.report
            tasks = there.tasks(items, key, retry)

            def show(done: int) -> None:
                bar.show(done + report.items - report.computed)

            run = self._pool.run(dump_whole(function), lambda count: next(tasks, None), show)
            for _, value, error in stack.enter_context(contextlib.closing(run)):
                if error:
                    raise error
                report.failed += len(value)
                for name, reason in value.items():
                    logger.warning("%s failed: %s", name, reason)
            return there.finish()

    def _facts(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return what results depend on: the pipeline, this job, and what the user says."""
        known = {
            **(self.handle.facts if self.handle else {}),
            "seed": str(self._setup.seed),
            "threads": str(self._setup.threads),
            "device": self._setup.device.partition(":")[0],
            "version": "2",
        }
        for name, value in facts.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise ArgumentError(f"facts has {value!r} as {name!r}; give text")
        if taken := known.keys() & facts.keys():
            raise ArgumentError(
                f"facts has {min(taken)!r}, which the folder records itself; choose another name"
            )
        return known | dict(facts)


def _failed(row: Row, item: object, error: BaseException) -> ItemFailed:
    reason = row.refusal or describe_error(error)
    failed = ItemFailed(
        f"item {row.number}, {_ITEM.repr(item)}: {reason}",
        index=row.number,
        item=item,
        reason=reason,
        endings=row.endings,
    )
    failed.__cause__ = None if row.refusal else error
    return failed


class _Bar(tqdm):  # type: ignore[misc]  # it has no types
    monitor_interval = 0  # it would start a thread

    def __init__(self, items: Iterable[Any], progress: bool | None) -> None:
        total = len(items) if isinstance(items, Sized) else None
        # tqdm takes None for nothing off a terminal; it needs a stream.
        is_open = progress is None and sys.stderr is not None
        super().__init__(total=total, unit="item", disable=None if is_open else not progress)

    def show(self, done: int) -> None:
        """Show how many items are done."""
        self.update(done - self.n)
