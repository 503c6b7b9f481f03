"""Ray: sources resident on every node of a cluster, and stages of Ray Data that share them.

Guarantee: a failure on one node is the error in that node's report, within a deadline. It neither
delays nor fails the other nodes.
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
    if exc.name != "ray":  # installed, and broken
        raise
    raise ModuleNotFoundError(
        "shmload.integrations.ray needs Ray: pip install 'shmload[ray]'", name="ray"
    ) from exc
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmload import SegmentInfo, WarmReport, evict, segments, warm
from shmload._checkpoints.hub import find_source
from shmload._checkpoints.wanted import HUB_ARGUMENTS, Hub, Wanted, chosen_dtype, require_known
from shmload.errors import NodeFailed, NodeLost, NodeTimeout, SegmentNotFound, ShmloadError
from shmload.integrations.diffusers import load_pipeline

T = TypeVar("T")

# To fetch a result that is ready; it takes longer only if the node dies in that moment.
_FETCH_TIMEOUT_S = 30.0
_NOT_ALIVE = "it is not one of the nodes that are alive"


class NodeReport(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The result of one node, or its error."""

    node_id: str
    """Ray's id of the node."""
    address: str
    """Ray's address of the node; empty if Ray does not know the node."""
    report: T | None
    """The result; None if the node failed."""
    error: ShmloadError | None
    """Why the node failed; None if it did not."""


# On every node ------------------------------------------------------------------------------------


def warm_cluster(
    source: str | os.PathLike[str],
    *,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    nodes: Collection[str] | None = None,
    timeout_s: float = 3600.0,
    **warm_kwargs: Any,
) -> list[NodeReport[WarmReport]]:
    """Make a source resident on every node that is alive now, once on each.

    A node where it is resident reads no byte. Each node needs shmload and the source: a path that
    is valid there, or a hub id. The task asks Ray for no CPU, so it does not wait for running jobs.

    Args:
        source: as for `warm`. A path that exists here is made absolute.
        dtype: as for `warm`.
        components: as for `warm`.
        variant: as for `warm`.
        nodes: ids of the nodes; None for all.
        timeout_s: deadline for all nodes together, in seconds. On a node that is not done by then
            the process is killed; the next load there removes its unfinished segments.
        warm_kwargs: `workers`, `verify`, `pin`, and the arguments for the hub.

    Returns:
        One report for each node, in Ray's order. Its error is what `warm` raised there, such as a
        `CapacityError`; or a `NodeError`: the node died, missed the deadline, or failed otherwise.

    Raises:
        ArgumentError: an argument is unknown, or the dtype is given under both of its names.
    """
    dtype = chosen_dtype(dtype, warm_kwargs.pop("torch_dtype", None))
    require_known(warm_kwargs, warm_cluster, HUB_ARGUMENTS | {"workers", "verify", "pin"})
    work = functools.partial(
        warm,
        _absolute(source),
        dtype=dtype,
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
    """Remove the resident segments of a source on every node that is alive now.

    Args:
        source: as for `warm_cluster`, or the name of a segment.
        nodes: as for `warm_cluster`.
        timeout_s: as for `warm_cluster`.
        hub_kwargs: `revision` and `cache_dir`, for a hub id.

    Returns:
        One report for each node, as `warm_cluster`, with the segments that were removed. The
        error is a `SegmentBusy` if a process is attached to one; the others are removed.
    """
    work = functools.partial(_evict, _absolute(source), hub_kwargs)
    return _on_each_node("evict", work, nodes, timeout_s)


def cluster_segments(
    *, nodes: Collection[str] | None = None, timeout_s: float = 120.0
) -> list[NodeReport[list[SegmentInfo]]]:
    """List the segments on every node that is alive now.

    Args:
        nodes: as for `warm_cluster`.
        timeout_s: as for `warm_cluster`.
    """
    return _on_each_node("segments", segments, nodes, timeout_s)


def _evict(source: str, hub_kwargs: dict[str, Any]) -> list[SegmentInfo]:
    """Evict a source on this node."""
    pattern: str | os.PathLike[str] = source
    with contextlib.suppress(ShmloadError):  # segments may outlive their source
        hub = Hub(local_files_only=True, **hub_kwargs)
        pattern = find_source(Wanted(source=source, hub=hub)).root
    try:
        return evict(pattern)
    except SegmentNotFound:
        return []


def _absolute(source: str | os.PathLike[str]) -> str:
    """Return an absolute path, or a hub id: Ray's processes have other working directories."""
    return os.path.abspath(source) if os.path.exists(source) else os.fspath(source)


def _on_each_node(
    name: str, work: Callable[[], T], nodes: Collection[str] | None, timeout_s: float
) -> list[NodeReport[T]]:
    """Call a function once on each node, all at the same time, and return the reports."""
    # No retries: the process may have been killed because the node ran out of memory.
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
    finally:  # a Ctrl-C ends them too
        for task in late:
            ray.cancel(task, force=True)  # not forced, it would end only when its own wait does
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
    """Call a function in a process of Ray's; return shmload's errors instead of raising them."""
    try:
        return work(), None
    except ShmloadError as exc:
        return None, exc


def _outcome(task: Any, node_id: str, address: str) -> tuple[T | None, ShmloadError | None]:
    """Return the result of a task that is over, or its error."""
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

    For `Dataset.map_batches`: all its actors on a node share one copy of the weights. The first
    actor decodes what is not resident there; the others wait for it and attach.

        images.map_batches(
            Stage,
            fn_constructor_args=(encode, "/models/sd"),
            fn_constructor_kwargs={"components": ["vae"], "dtype": "bfloat16"},
            compute=ray.data.ActorPoolStrategy(size=8),
            batch_size=16,
        )

    Args:
        fn: called with the pipeline, a batch, and the `fn_args` and `fn_kwargs` of `map_batches`;
            returns or yields batches. It may be defined anywhere, in `__main__` too.
        source: as for `load_pipeline`; a path must be absolute, and the same on every node.
        components: the models to load; the others are None. Components without weights, such as
            tokenizers and schedulers, are always loaded. None for all.
        dtype: as for `load_pipeline`.
        load_kwargs: other arguments for `load_pipeline`, such as `variant` or `device_map="cuda"`.

    Attributes:
        pipe: the pipeline. Its weights are mapped copy-on-write: a write to one is private to the
            actor.

    Raises:
        ShmloadError: what `load_pipeline` raises; Ray Data then ends the job with it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        source: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        dtype: Any = None,
        **load_kwargs: Any,
    ) -> None:
        self._fn = fn
        self.pipe = load_pipeline(
            source, components=components, dtype=dtype, share=True, **load_kwargs
        )

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns for a batch."""
        return self._fn(self.pipe, batch, *args, **kwargs)
