"""Ray: sources resident on every node of a cluster, and stages of Ray Data that share them.

Guarantee: whatever happens on one node becomes the error in its own report, within a deadline, and
neither holds up nor spoils what is done on the others.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import msgspec

try:
    import ray
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "shmload.integrations.ray needs Ray: pip install 'shmload[ray]'", name="ray"
    ) from exc
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmload._checkpoints.hub import find_source
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._loading.verbs import WarmReport, warm
from shmload._segments.listing import SegmentInfo, evict, segments
from shmload.errors import NodeFailed, NodeLost, NodeTimeout, SegmentNotFound, ShmloadError
from shmload.integrations.diffusers import load_pipeline

T = TypeVar("T")

# For what is there already; more is only waited for if the node dies just then.
_FETCH_TIMEOUT_S = 30.0
_NOT_ALIVE = "it is none of the nodes that are alive"


class NodeReport(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What was done on one node, or why it was not."""

    node_id: str
    """As Ray calls it."""
    address: str
    """Of the node, as Ray knows it; empty if it does not."""
    report: T | None
    """What was done; None if it failed."""
    error: ShmloadError | None
    """Why it failed; None if it did not."""


# On every node ------------------------------------------------------------------------------------


def warm_cluster(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    nodes: Collection[str] | None = None,
    timeout_s: float = 3600.0,
    **warm_kwargs: Any,
) -> list[NodeReport[WarmReport]]:
    """Make a source resident on every node that is alive now, once on each.

    A node that has it already reads no byte. Each needs shmload, and the source: a path that leads
    to it there, or a hub id. It takes no CPU of Ray's reckoning, so it does not wait for a job.

    Args:
        source: as for `warm`. A path that exists here is made absolute.
        torch_dtype: as for `warm`, like all arguments that are not named here.
        components: as for `warm`.
        variant: as for `warm`.
        nodes: ids of the only nodes to do it on; None for all.
        timeout_s: how long it may take in all, in seconds. On a node that is not done by then the
            process is killed; what it had begun goes with the next load there.
        warm_kwargs: `workers`, `verify`, `pin`, and those for the hub.

    Returns:
        One report for each node, in Ray's order. The error of one is what `warm` raised there, such
        as a `CapacityError`; or a `NodeError`: it died, was not done in time, or failed otherwise.
    """
    work = functools.partial(
        warm,
        _absolute(source),
        torch_dtype=torch_dtype,
        components=components,
        variant=variant,
        progress=False,
        **warm_kwargs,
    )
    return _on_each_node("warm", work, nodes, timeout_s)


def evict_cluster(
    source: str | os.PathLike[str],
    *,
    nodes: Collection[str] | None = None,
    timeout_s: float = 120.0,
    **hub_kwargs: Any,
) -> list[NodeReport[list[SegmentInfo]]]:
    """Remove what is resident of a source on every node that is alive now.

    Args:
        source: as for `warm_cluster`, or the name of a segment.
        nodes: as for `warm_cluster`.
        timeout_s: as for `warm_cluster`.
        hub_kwargs: `revision` and `cache_dir`, for a hub id.

    Returns:
        As `warm_cluster`, with what was removed: nothing where nothing was. The error is a
        `SegmentBusy` where a process is attached; what else there was is removed.
    """
    work = functools.partial(_evict, _absolute(source), hub_kwargs)
    return _on_each_node("evict", work, nodes, timeout_s)


def cluster_segments(
    *, nodes: Collection[str] | None = None, timeout_s: float = 120.0
) -> list[NodeReport[list[SegmentInfo]]]:
    """List what is resident on every node that is alive now.

    Args:
        nodes: as for `warm_cluster`.
        timeout_s: as for `warm_cluster`.
    """
    return _on_each_node("segments", segments, nodes, timeout_s)


def _evict(source: str, hub_kwargs: dict[str, Any]) -> list[SegmentInfo]:
    """Evict a source on the node where this is called."""
    pattern: str | os.PathLike[str] = source
    with contextlib.suppress(ShmloadError):  # segments may outlive their source
        hub = Hub(local_files_only=True, **hub_kwargs)
        pattern = find_source(Wanted(source=source, hub=hub)).root
    try:
        return evict(pattern)
    except SegmentNotFound:
        return []


def _absolute(source: str | os.PathLike[str]) -> str:
    """Return what a source is called everywhere: processes of Ray have their own directories."""
    return os.path.abspath(source) if os.path.exists(source) else os.fspath(source)


def _on_each_node(
    name: str, work: Callable[[], T], nodes: Collection[str] | None, timeout_s: float
) -> list[NodeReport[T]]:
    """Do the same once on each node, at the same time, and return what became of it."""
    # What failed is told and not repeated: it may have been a kill for want of memory.
    run = ray.remote(num_cpus=0, max_retries=0, name=f"shmload.{name}")(_run)
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    wanted = list(alive) if nodes is None else list(dict.fromkeys(nodes))
    tasks = {
        node_id: run.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(work)
        for node_id in wanted
        if node_id in alive
    }
    late = list(tasks.values())
    try:
        if late:
            _, late = ray.wait(late, num_returns=len(late), timeout=timeout_s)
    finally:  # a Ctrl-C here shall end them too
        for task in late:
            ray.cancel(task, force=True)  # without, it ends when what it waits for does
    reports = []
    for node_id in wanted:
        address = alive.get(node_id, "")
        report: T | None = None
        error: ShmloadError | None
        if node_id not in tasks:
            error = NodeLost(node_id, address, _NOT_ALIVE)
        elif tasks[node_id] in late:
            error = NodeTimeout(node_id, address, timeout_s)
        else:
            report, error = _outcome(tasks[node_id], node_id, address)
        reports.append(NodeReport(node_id=node_id, address=address, report=report, error=error))
    return reports


def _run(work: Callable[[], T]) -> tuple[T | None, ShmloadError | None]:
    """Do some work in a process of Ray's; errors of shmload come back as they are."""
    try:
        return work(), None
    except ShmloadError as exc:
        return None, exc


def _outcome(task: Any, node_id: str, address: str) -> tuple[T | None, ShmloadError | None]:
    """Return what a task that is over has returned, or why it did not."""
    try:
        result: tuple[T | None, ShmloadError | None] = ray.get(task, timeout=_FETCH_TIMEOUT_S)
        return result
    except RayTaskError as exc:
        told = str(exc).strip()
        failed = NodeFailed(node_id, address, told.rpartition("\n")[2].strip())
        failed.add_note(told)
        return None, failed
    except TaskUnschedulableError:
        return None, NodeLost(node_id, address, _NOT_ALIVE)
    except RayError as exc:
        sentence = str(exc).strip().partition("\n")[0].partition(". ")[0]
        return None, NodeLost(node_id, address, sentence.removesuffix("."))


# In Ray Data --------------------------------------------------------------------------------------


class Stage:
    """A stage of Ray Data that calls a function with a pipeline and each batch.

    For `Dataset.map_batches`: all of its actors on a node share one copy of the weights. The first
    of them decodes what is not resident there, the others wait for it and attach.

        images.map_batches(
            Stage,
            fn_constructor_args=(encode, "/models/sd"),
            fn_constructor_kwargs={"components": ["vae"], "torch_dtype": "bfloat16"},
            compute=ray.data.ActorPoolStrategy(size=8),
            batch_size=16,
        )

    Args:
        fn: is called with the pipeline, a batch, and the `fn_args` and `fn_kwargs` of
            `map_batches`; what it returns or yields are batches. It may be defined anywhere, in
            `__main__` too.
        source: as for `load_pipeline`; a path has to be absolute, and the same on every node.
        components: of the models only these, the others are None; tokenizers, schedulers and other
            parts without weights are always there. None for all.
        torch_dtype: as for `load_pipeline`.
        load_kwargs: everything else that `load_pipeline` takes, such as `variant` or
            `device_map="cuda"`.

    Attributes:
        pipe: the pipeline. Its weights are mapped copy-on-write: to write to one is private to the
            actor.

    Raises:
        ShmloadError: as `load_pipeline`; Ray Data then ends the job with it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        source: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        torch_dtype: object = None,
        **load_kwargs: Any,
    ) -> None:
        self._fn = fn
        self.pipe = load_pipeline(
            source, components=components, torch_dtype=torch_dtype, share=True, **load_kwargs
        )

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the function makes of a batch."""
        return self._fn(self.pipe, batch, *args, **kwargs)
